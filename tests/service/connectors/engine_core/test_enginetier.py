"""An embedded engine with a fleet tier, driven by vLLM's steps: what requests wait for, and what they get."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
from tests.engine.conftest import Eventually
from tests.service.connectors.engine_core.tieredvllmhost import KEYS, TOKENS, MakeHost, ask_until_fetching, filled
from tests.service.connectors.engine_core.vllmhost import FakeRequest

from kvstow.control.fleettier import FleetTier
from kvstow.errors import TierUnavailableError
from kvstow.testing.tier import ControlledStore
from kvstow.tier.fingerprint import TIER_FAILED, Fingerprint
from kvstow_service.connectors.engine_core.kvgroups import KVGroup
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest


def test_blocks_that_were_stored_are_put_in_later_steps(make: MakeHost, store: ControlledStore) -> None:
    host = make()
    request = FakeRequest("r", TOKENS)
    host.run(request)
    host.finish(request)
    host.step()
    assert host.stored() == set(KEYS)
    while store.num_objects < len(KEYS):
        assert host.tier.wants_steps, "an idle vLLM must make steps"
        host.step_tier()
        host.move_all()
    assert not host.tier.wants_steps


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_request_waits_for_blocks_that_come_and_then_hits_the_pool(
    make: MakeHost, store: ControlledStore, eventually: Eventually, num_ranks: int
) -> None:
    filled(store, num_ranks)
    host = make(num_ranks=num_ranks)
    request = FakeRequest("r", TOKENS + "ij")
    ask_until_fetching(host, request, eventually)
    for rank, op in host.fetches:
        assert host.look_up(request) is None, "a rank has not got its bytes yet"
        assert host.stored() == set()
        host.move(rank, op)
    assert host.look_up(request) == len(TOKENS)
    assert host.stored() == set(KEYS)
    host.admit(request, load=len(TOKENS))
    host.step()
    assert host.contents(request)[: len(KEYS)] == KEYS
    host.resume(request, 2)
    host.finish(request)
    assert host.leases == 0


def test_a_request_that_is_not_admitted_asks_once(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    host = make()
    request = FakeRequest("r", TOKENS)
    eventually(lambda: host.look_up_in_step(request) == 0)
    for _ in range(5):
        host.time.advance(60)  # what is known of the store is old
        assert host.look_up(request) == 0
        host.step_tier()
    assert [kind for kind, _ in store.batches] == ["exists"]


def test_a_look_up_that_takes_long_costs_20_ms(make: MakeHost, store: ControlledStore) -> None:
    filled(store)
    store.lookups.shut()
    host = make()
    request = FakeRequest("r", TOKENS)
    assert host.look_up(request) is None
    host.step_tier()
    store.lookups.wait_arrived(1)
    host.time.advance(0.0199)
    assert host.look_up(request) is None
    host.time.advance(0.0002)
    assert host.look_up(request) == 0


def test_the_keys_of_a_request_that_waits_are_not_copied_in_each_step(
    make: MakeHost, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.lookups.shut()
    host = make()
    request = FakeRequest("r", TOKENS)
    assert host.look_up(request) is None
    copied: list[int] = []
    keys = TrackedRequest.keys

    def counted(tracked: TrackedRequest, group: KVGroup, first: int, end: int) -> list[bytes]:
        copied.append(end - first)
        return keys(tracked, group, first, end)

    monkeypatch.setattr(TrackedRequest, "keys", counted)
    for _ in range(3):
        assert host.look_up(request) is None
    assert copied == []
    host.time.advance(1)
    assert host.look_up(request) == 0
    assert copied == [len(KEYS)]


def test_what_the_pool_has_is_kept_for_a_request_that_waits(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store)
    host = make()
    host.store(*KEYS[:2])
    request = FakeRequest("r", TOKENS + "ij")
    ask_until_fetching(host, request, eventually)
    assert host.leases == 1
    ((rank, op),) = host.fetches
    assert op.keys == tuple(KEYS[2:])
    host.move(rank, op)
    assert host.look_up(request) == len(TOKENS)
    host.side.finish(request, request.block_ids)
    assert host.leases == 0


def test_a_request_that_ends_while_it_waits_leaves_no_lease(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store)
    host = make()
    host.store(*KEYS[:2])
    request = FakeRequest("r", TOKENS + "ij")
    ask_until_fetching(host, request, eventually)
    host.side.finish(request, request.block_ids)
    assert host.leases == 0
    host.move_all()


def test_the_leading_run_that_has_come_in_time_is_used(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store)
    host = make()
    request = FakeRequest("r", TOKENS)
    ask_until_fetching(host, request, eventually)
    ((rank, op),) = host.fetches
    host.move(rank, op, 2)
    assert host.look_up(request) == 4


def test_a_fetch_that_is_too_slow_is_not_waited_for(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store)
    host = make()
    request = FakeRequest("r", TOKENS)
    ask_until_fetching(host, request, eventually)
    host.time.advance(2.1)
    assert host.look_up(request) == 0
    assert host.tier.wants_steps, "its end is still to come"
    host.move_all()
    assert host.stored() == set(KEYS)
    assert not host.tier.wants_steps


def test_nothing_fetched_before_a_reset_is_ever_visible(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store)
    host = make()
    request = FakeRequest("r", TOKENS)
    ask_until_fetching(host, request, eventually)
    assert host.side.reset()
    host.move_all()
    assert host.stored() == set()
    assert host.look_up(request) == 0, "nothing is asked for until the weights have a name"
    host.admit(request, len(TOKENS))
    host.step({request: len(TOKENS)})
    host.finish(request)
    for _ in range(5):
        host.step()
        host.step_tier()
    assert host.ops == []
    assert host.stored() == set(KEYS)
    host.tier.fleet.begin_epoch("g")
    other = FakeRequest("other", TOKENS[:4] + "xy")
    assert host.look_up(other) is None


def test_a_store_that_fails_costs_hits_and_nothing_else(
    make: MakeHost, store: ControlledStore, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    filled(store)
    store.error = TierUnavailableError("injected")
    host = make()
    request = FakeRequest("r", TOKENS)
    eventually(lambda: host.look_up_in_step(request) == 0)
    assert host.tier.fleet.status().state == "down"
    assert "left alone" in caplog.text
    assert host.look_up(FakeRequest("other", TOKENS)) == 0, "it is not even asked"
    assert host.engine.stats().faults.errors.get("host", 0) == 0


@pytest.mark.parametrize("broken", ["look_for", "is_over", "step", "note_used"])
def test_a_defect_of_the_tier_fails_no_request(
    make: MakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """vLLM goes on with its pool."""
    host = make()
    host.store(*KEYS if broken == "note_used" else KEYS[:2])
    request = FakeRequest("r", TOKENS)
    if broken == "is_over":
        assert host.look_up(request) is None

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(host.tier.fleet, broken, fail)
        if broken == "step":
            assert host.plan_tier({}) == ()
        assert host.look_up(request) == (8 if broken == "note_used" else 4)
    assert caplog.text.count("the fleet tier has failed") == 1
    assert host.plan_tier({}) == ()
    assert not host.tier.wants_steps
    status = host.tier.fleet.status()
    assert (status.state, status.reason) == ("off", TIER_FAILED), "operators see it"
    host.side.finish(request, request.block_ids)
    assert host.leases == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_defect_strands_no_transfer_that_has_begun(
    make: MakeHost, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    host = make(num_ranks=num_ranks)
    host.store(*KEYS)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    def begun() -> None:
        FleetTier.step(host.tier.fleet)
        if host.tier.fleet.traffic.in_flight:
            fail()

    monkeypatch.setattr(host.tier.fleet, "step", begun)
    for _ in range(5):
        host.step_tier()
    assert host.tier.has_failed
    assert host.ops == []
    assert host.tier.fleet.traffic.in_flight == 0
    assert list(host.engine.held_slots()) == []
    assert not host.tier.wants_steps
    assert host.stored() == set(KEYS)


def test_a_put_that_is_under_way_when_the_tier_fails_ends_without_rank_0(make: MakeHost) -> None:
    host = make(num_ranks=2)
    host.store(*KEYS)
    for _ in range(2):
        host.step_tier()
    assert [rank for rank, _ in host.ops] == [1]
    try:
        raise RuntimeError("injected")
    except RuntimeError:
        host.tier.fail("test")
    assert host.tier.wants_steps, "its end is still to come"
    host.move(*host.ops[0])
    assert host.tier.fleet.traffic.in_flight == 0
    assert not host.tier.wants_steps


class Known(NamedTuple):
    """An `Identity` that the first request finds."""

    found: Fingerprint
    is_final: bool = True

    def fingerprint(self) -> Fingerprint:
        return self.found


@pytest.mark.parametrize("value", ["f", None])
def test_the_first_request_identifies_the_blocks(
    make: MakeHost, store: ControlledStore, value: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has no block hashes before."""
    host = make(identity=Known(Fingerprint(value, "for a reason")))
    assert host.tier.fleet.status().state == "off"
    waits = host.look_up(FakeRequest("r", TOKENS)) is None
    status = host.tier.fleet.status()
    assert (waits, status.state) == ((True, "on") if value else (False, "off"))
    assert ("the fleet tier is off: for a reason" in caplog.text) == (value is None)


def test_an_engine_that_was_reset_before_its_first_request_is_not_identified(make: MakeHost) -> None:
    """Its weights may be others than those that were loaded."""
    host = make(identity=Known(Fingerprint("f")))
    assert host.side.reset()
    assert host.look_up(FakeRequest("r", TOKENS)) == 0
    assert host.tier.fleet.fingerprint is None


def test_the_prefill_speed_comes_from_the_steps(make: MakeHost) -> None:
    host = make()
    host.plan_tier({"r": 1000})
    host.time.advance(0.5)
    host.tier.ended(host.number)
    assert host.tier.fleet.status().prefill_tokens_per_second == 2000
