"""Lookups that the service says take time, as it waits for the fleet tier, or for memory to be registered."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, WITH_WINDOW, FakeRequest
from tests.service.connectors.vllm.attachedvllmhost import PROMPT, AttachedVllmHost, with_prompt

from kvstow.attach.calls import SettledOp, SettledOps
from kvstow.messages import Completion
from kvstow_service.connectors.engine_core.controlplane import (
    LONGEST_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    SILENT_SECONDS,
    SLOW_SECONDS,
    AttachState,
)
from kvstow_service.connectors.engine_core.kvgroups import KVGroups


def holding_lookups(groups: KVGroups = ONE_GROUP) -> AttachedVllmHost:
    """A host of `with_prompt` whose service takes its time."""
    host = with_prompt(groups)
    host.service.holds_lookups = True
    return host


def asked(host: AttachedVllmHost, name: str = "r") -> FakeRequest:
    """A request of `PROMPT` that has been told to wait, as the service has said that its lookup takes time."""
    request = FakeRequest(name, PROMPT)
    host.expect(request)
    host.step()
    assert host.ask_now(request) is None
    return request


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW])
def test_a_request_waits_for_a_lookup_that_takes_time(groups: KVGroups) -> None:
    host = holding_lookups(groups)
    request = asked(host)
    host.clock.advance(LONGEST_PATIENCE_SECONDS - 0.01)
    host.step()
    assert host.ask_now(request) is None
    host.service.answer_held()
    assert host.answer(request) == 12
    host.admit(request, load=12)
    host.step()
    host.step()
    assert host.has_loaded(request, 12)
    assert host.leases == 0


@pytest.mark.parametrize(
    ("groups", "fetched", "tokens"),
    [
        (ONE_GROUP, (), 0),
        (ONE_GROUP, ((1, 3), (5, 1)), 8),
        (ONE_GROUP, ((0, 6),), 12),
        (WITH_WINDOW, ((2, 2), (8, 4)), 8),  # tokens 4 to 8 of one group, 4 to 12 of the other
    ],
)
def test_what_the_tier_has_brought_is_told_of_the_tokens_that_are_loaded(
    groups: KVGroups, fetched: tuple[tuple[int, int], ...], tokens: int
) -> None:
    host = holding_lookups(groups)
    host.service.fetched = fetched
    request = asked(host)
    host.service.answer_held()
    assert host.answer(request) == 12
    host.admit(request, load=12)
    assert host.side.fetched_tokens(request) == tokens


def test_a_lookup_that_is_only_late_is_a_miss_much_sooner() -> None:
    host = holding_lookups()
    host.service.is_silent = True
    request = FakeRequest("r", PROMPT)
    assert host.ask_now(request) is None
    host.clock.advance(PATIENCE_SECONDS + 0.01)
    assert host.ask_now(request) == 0


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW])
def test_an_answer_that_takes_too_long_is_a_miss_and_holds_nothing_when_it_comes(groups: KVGroups) -> None:
    host = holding_lookups(groups)
    request = asked(host)
    host.clock.advance(LONGEST_PATIENCE_SECONDS + 0.01)
    assert host.ask_now(request) == 0
    host.service.answer_held()
    host.step()
    assert host.leases == 0


def test_a_request_that_does_not_wait_is_answered_before_one_that_does() -> None:
    host = holding_lookups()
    first = asked(host, "first")
    host.service.holds_lookups = False
    assert host.answer(FakeRequest("second", PROMPT)) == 12
    assert host.ask_now(first) is None
    host.service.answer_held()
    assert host.answer(first) == 12


def test_a_session_that_ends_meanwhile_costs_the_hit_and_the_next_one_has_it() -> None:
    host = holding_lookups()
    request = asked(host)
    host.service.lose()
    assert host.ask_now(request) == 0
    host.service.holds_lookups = False
    host.step()
    host.step()
    assert host.answer(FakeRequest("next", PROMPT)) == 12


def test_a_service_that_takes_its_time_does_not_count_as_silent() -> None:
    host = holding_lookups()
    asked(host)
    for _ in range(4):
        host.clock.advance(SLOW_SECONDS + 0.01)
        host.step()
        assert host.control.state == AttachState("attached", sharing="yes")
    host.clock.advance(SILENT_SECONDS + 0.1)
    host.step()
    assert host.control.is_attached
    assert host.control.problem is None


def test_the_times_of_ops_that_have_failed_are_not_kept() -> None:
    """The service has given up a store that a rank ends afterwards."""
    host, request = AttachedVllmHost(), FakeRequest("r", PROMPT)
    host.run(request, copy=False)
    host.finish(request)
    plans = [host.step(copy=False) for _ in range(4)]
    (op,) = [op for plan in plans for op in plan.stores.ops]
    (under_way,) = host.service.facade.transfers()
    said = SettledOps((SettledOp(under_way.op_id, "store", "failed", "too late"),), room=0)
    host.service.connection.push(said)
    host.step(copy=False)
    (rank,) = host.ranks
    host.control.complete(0, rank.boot_id, [Completion(op.op_id, "done", seconds=0.5)])
    host.step()
    assert not host.control.moved_seconds
