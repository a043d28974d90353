"""Models with several KV groups, or a window, on a fleet tier: what is fetched is what a hit needs."""

from __future__ import annotations

import string
from collections.abc import Iterable
from random import Random

import pytest
from tests.engine.conftest import Eventually
from tests.service.connectors.engine_core.test_hits import KINDS, needed, oracle
from tests.service.connectors.engine_core.tieredvllmhost import MakeHost, TierHost, ask_until_fetching, filled
from tests.service.connectors.engine_core.vllmhost import WITH_WINDOW, FakeRequest, keys_of

from kvstow.testing.tier import ControlledStore
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.longesthit import GroupNeeds

PROMPT = string.ascii_lowercase
STATES = KVGroups((KVGroup(0, 2, 1), KVGroup(1, 2, 1, is_state=True)), 2)
PARTIAL = {name: groups for name, groups in KINDS.items() if not groups.is_plain}
FETCHED = sorted(PARTIAL.keys() - {"chunked alone"})
"""Its longest hit ends where a chunk begins, and needs no block."""

Block = tuple[KVGroup, int]


def all_blocks(groups: KVGroups) -> list[Block]:
    return [(group, number) for group in groups.groups for number in range(len(keys_of(PROMPT, group)))]


def keys_at(blocks: Iterable[Block]) -> list[bytes]:
    return [keys_of(PROMPT, group)[number] for group, number in blocks]


def store_alone(host: TierHost, keys: Iterable[bytes]) -> None:
    """In the pool: what was stored while the tier is bypassed is not put."""
    host.store(*keys)
    host.tier.fleet.set_bypassed(True)
    host.step_tier()
    host.tier.fleet.set_bypassed(False)


def fetched(host: TierHost) -> set[bytes]:
    return {key for _, op in host.fetches for key in op.keys}


@pytest.mark.parametrize("kind", FETCHED)
def test_what_a_hit_needs_of_each_group_is_fetched_and_nothing_else(
    make: MakeHost, store: ControlledStore, eventually: Eventually, kind: str
) -> None:
    groups = PARTIAL[kind]
    filled(store, keys=keys_at(all_blocks(groups)))
    host = make(groups=groups)
    request = FakeRequest("r", PROMPT)
    ask_until_fetching(host, request, eventually)
    longest = oracle(groups, len(PROMPT), 0, set(all_blocks(groups)))
    wanted = set(keys_at(needed(groups, 0, longest)))
    assert fetched(host) == wanted
    host.move_all()
    assert host.look_up(request) == longest
    host.admit(request, load=longest)
    host.step()
    assert wanted <= {content for group in groups.groups for content in host.contents(request, group)}


def test_a_state_is_fetched_with_the_blocks_before_it(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    """States are kept where a step has ended alone, so a hit ends at one of them."""
    full, state = STATES.groups
    filled(store, keys=keys_of(PROMPT, full) + [keys_of(PROMPT, state)[number] for number in (2, 7)])
    host = make(groups=STATES)
    request = FakeRequest("r", PROMPT)
    ask_until_fetching(host, request, eventually)
    assert fetched(host) == {*keys_of(PROMPT, full)[:8], keys_of(PROMPT, state)[7]}
    host.move_all()
    assert host.look_up(request) == 16


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", PARTIAL)
def test_a_hit_is_the_longest_that_pool_and_store_have_together(
    make: MakeHost, store: ControlledStore, eventually: Eventually, kind: str, seed: int
) -> None:
    groups, random = PARTIAL[kind], Random(f"{kind}/{seed}")
    places = ["pool", "store", "both", *["store"] * 7, *["nowhere"] * (seed % 2)]
    where = {block: random.choice(places) for block in all_blocks(groups)}
    host = make(groups=groups)
    store_alone(host, keys_at(block for block, place in where.items() if place in ("pool", "both")))
    filled(store, keys=keys_at(block for block, place in where.items() if place in ("store", "both")))
    present = {block for block, place in where.items() if place != "nowhere"}
    expected = oracle(groups, len(PROMPT), 0, present)
    assert host.look_up_at_last(FakeRequest("r", PROMPT), eventually) == expected


def test_a_hit_that_the_store_cannot_make_longer_is_not_waited_for(make: MakeHost, store: ControlledStore) -> None:
    """The blocks that have left the window are in the store, and no use."""
    filled(store, keys=keys_at(all_blocks(WITH_WINDOW)))
    host = make(groups=WITH_WINDOW)
    host.store(*keys_at(needed(WITH_WINDOW, 0, 24)))
    request = FakeRequest("r", PROMPT)
    assert host.look_up(request) == 24
    needs = GroupNeeds(WITH_WINDOW, host.side._tracked(request), 0, 24)
    assert host.tier.fleet.look_for(needs.keys, 0, needs) is None, "as a node service asks, for all lookups"
    host.step_tier()
    assert store.batches == []


def test_what_the_pool_has_is_used_when_the_rest_does_not_come(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store, keys=keys_at(all_blocks(WITH_WINDOW)))
    host = make(groups=WITH_WINDOW)
    host.store(*keys_at(needed(WITH_WINDOW, 0, 8)))
    request = FakeRequest("r", PROMPT)
    ask_until_fetching(host, request, eventually)
    assert host.leases == 1, "it may not be evicted meanwhile"
    ((rank, op),) = host.fetches
    host.move(rank, op, len(op.keys) - 1)
    assert host.look_up(request) == 8, "the window at the end is not whole"
    host.side.finish(request, request.block_ids)
    assert host.leases == 0


def test_a_full_pool_keeps_the_blocks_that_a_fetch_completes(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    """Those of one group are in the pool, those of the other come, and blocks of others make room for them."""
    full, window = WITH_WINDOW.groups
    filled(store, keys=keys_of(PROMPT, window))
    host = make(groups=WITH_WINDOW, slots=14)
    store_alone(host, keys_of(PROMPT, full)[:12])  # the oldest
    store_alone(host, [b"other", b"another"])
    request = FakeRequest("r", PROMPT)
    assert host.look_up_at_last(request, eventually) == 24
    assert {b"other", b"another"}.isdisjoint(host.stored())


@pytest.mark.parametrize("slots", [6, 9, 14])
@pytest.mark.parametrize("kind", ["two full", "window", "window of another block size", "window alone"])
def test_in_a_small_pool_the_longest_hit_that_it_has_room_for_is_fetched(
    make: MakeHost, store: ControlledStore, eventually: Eventually, kind: str, slots: int
) -> None:
    groups = PARTIAL[kind]
    filled(store, keys=keys_at(all_blocks(groups)))
    host = make(groups=groups, slots=slots)
    longest = oracle(groups, len(PROMPT), 0, set(all_blocks(groups)))
    hits = {end: keys_at(needed(groups, 0, end)) for end in range(0, longest + 1, groups.alignment)}
    expected = max(end for end, keys in hits.items() if len(keys) <= slots)
    request = FakeRequest("r", PROMPT)
    ask_until_fetching(host, request, eventually)
    assert fetched(host) == set(hits[expected])
    host.move_all()
    assert host.look_up(request) == expected


def test_a_request_that_waits_for_what_is_fetched_for_another_fetches_nothing(
    make: MakeHost, store: ControlledStore, eventually: Eventually
) -> None:
    filled(store, keys=keys_at(all_blocks(WITH_WINDOW)))
    host = make(groups=WITH_WINDOW)
    ask_until_fetching(host, FakeRequest("r", PROMPT), eventually)
    begun = fetched(host)
    other = FakeRequest("other", PROMPT)
    for _ in range(3):
        assert host.look_up_in_step(other) is None
    assert fetched(host) == begun
    assert len(host.fetches) == 1
    host.move_all()
    assert host.look_up(other) == 24


def test_a_block_that_is_being_stored_is_not_fetched(make: MakeHost, store: ControlledStore) -> None:
    """Its slot will be there soon, but no hit can be longer before."""
    full, _ = WITH_WINDOW.groups
    filled(store, keys=keys_at(all_blocks(WITH_WINDOW)))
    host = make(groups=WITH_WINDOW)
    host.tier.fleet._table.note(keys_at(all_blocks(WITH_WINDOW)), present=True)
    assert host.engine.begin_store(keys_of(PROMPT, full)[5:6], [1], request_id="").op is not None
    request = FakeRequest("r", PROMPT)
    assert host.look_up_in_step(request) is None
    assert fetched(host) == set(keys_at(needed(WITH_WINDOW, 0, 10)))


def test_a_reset_ends_what_requests_wait_for(make: MakeHost, store: ControlledStore, eventually: Eventually) -> None:
    filled(store, keys=keys_at(all_blocks(WITH_WINDOW)))
    host = make(groups=WITH_WINDOW)
    ask_until_fetching(host, FakeRequest("r", PROMPT), eventually)
    store.lookups.shut()
    other = FakeRequest("other", PROMPT + "unknown")
    assert host.look_up_in_step(other) is None
    assert host.side.reset()
    assert host.look_up(other) == 0, "it waits neither for the answer nor for the fetch"
    store.lookups.open()
    host.move_all()
    assert host.stored() == set()
    assert not host.tier.has_failed
