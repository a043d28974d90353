"""Hits: how many tokens of a request can be loaded, against a brute-force oracle, and what is held until admission."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.rank import FakeRank, make_ranks, store_keys
from tests.service.connectors.engine_core.vllmhost import (
    FULL,
    LARGE,
    ONE_GROUP,
    WINDOW,
    WITH_WINDOW,
    FakeRequest,
    keys_of,
)

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.results import Lease
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.loads import Loads
from kvstow_service.connectors.engine_core.stepplan import StepDraft
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

PROMPT = string.ascii_lowercase
CHUNKED = KVGroup(1, 2, 1, chunk=8)
LARGE_WINDOW = KVGroup(1, 6, 3, window=7)
KINDS = {
    "full": ONE_GROUP,
    "two full": KVGroups((FULL, KVGroup(1, 2, 1)), 2),
    "two block sizes": KVGroups((KVGroup(0, 4, 2), LARGE), 12),
    "window": WITH_WINDOW,
    "window of another block size": KVGroups((FULL, LARGE_WINDOW), 6),
    "window larger than the prompt": KVGroups((FULL, KVGroup(1, 2, 1, window=99)), 2),
    "window alone": KVGroups((KVGroup(0, 2, 1, window=5),), 2),
    "chunked": KVGroups((FULL, CHUNKED), 2),
    "chunked alone": KVGroups((KVGroup(0, 2, 1, chunk=8),), 2),
    "all": KVGroups((FULL, LARGE_WINDOW, KVGroup(2, 4, 2, chunk=8), KVGroup(3, 2, 1, window=3)), 12),
}


class Pool:
    """An engine that holds the blocks `present`, and loads over it."""

    def __init__(self, groups: KVGroups = ONE_GROUP, present: list[bytes] | None = None, num_ranks: int = 1) -> None:
        self.engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=256, num_ranks=num_ranks))
        self.ranks: list[FakeRank] = make_ranks(self.engine)
        control = EmbeddedControl(self.engine)
        draft = StepDraft()
        policy = LoadPolicy("async", 0.0, 1)
        self.loads = Loads(control, draft, groups, 0, lambda name, value: None, policy)
        self.groups = groups
        if present:
            store_keys(self.engine, self.ranks, present)

    def track(self, tokens: str = PROMPT) -> TrackedRequest:
        return TrackedRequest(FakeRequest("r", tokens), len(self.groups.groups))

    @property
    def leases(self) -> int:
        return self.engine.stats().pool.leases

    @property
    def held(self) -> set[bytes]:
        """Keys that eviction may not take."""
        return {bytes.fromhex(block.key) for block in self.engine.blocks(limit=1000).blocks if block.leases}


def needed(groups: KVGroups, local: int, end: int) -> set[tuple[KVGroup, int]]:
    """Blocks with a token from `local` to `end` that the token at `end` attends to."""
    return {
        (group, token // group.block_tokens)
        for group in groups.groups
        for token in range(local, end)
        if (group.window is None or end - token < group.window)
        and (group.chunk is None or token // group.chunk == end // group.chunk)
    }


def oracle(groups: KVGroups, num_tokens: int, local: int, present: set[tuple[KVGroup, int]]) -> int:
    """The longest hit that leaves a token to compute, by trying all; or all of the prompt, where that saves a block."""
    ends = [end for end in range(local + 1, num_tokens + groups.is_plain) if end % groups.alignment == 0]
    if ends == [num_tokens]:
        return 0
    longest = max((end for end in ends if needed(groups, local, end) <= present), default=local)
    return longest - local if needed(groups, local, longest) else 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_hit_is_the_longest_that_serves_every_group(kind: str, data: st.DataObject) -> None:
    groups = KINDS[kind]
    tokens = PROMPT[: data.draw(st.integers(1, 26), "tokens")]
    local = data.draw(st.integers(0, len(tokens) // groups.alignment), "local") * groups.alignment
    blocks = [(group, number) for group in groups.groups for number in range(len(tokens) // group.block_tokens)]
    missing = set(data.draw(st.lists(st.sampled_from(blocks), max_size=6), "missing")) if blocks else set()
    present = set(blocks) - missing
    pool = Pool(groups, [keys_of(tokens, group)[number] for group, number in blocks if (group, number) in present])
    tracked = pool.track(tokens)
    found = pool.loads.hold_hit(tracked, local)
    assert found == oracle(groups, len(tokens), local, present)
    wanted = {keys_of(tokens, group)[number] for group, number in needed(groups, local, local + found)}
    assert pool.held == wanted if found else pool.leases == 0
    pool.loads.release_hit(tracked)
    assert pool.leases == 0
    pool.engine.check_integrity()


def test_the_last_block_alone_is_never_worth_a_load() -> None:
    pool = Pool(present=keys_of(PROMPT))
    tracked = pool.track()
    assert pool.loads.hold_hit(tracked, 22) == 4
    assert pool.loads.hold_hit(tracked, 24) == 0
    assert (tracked.load.hit, pool.leases) == (None, 0)


def test_a_look_up_counts_the_blocks_that_would_be_loaded() -> None:
    pool = Pool(present=keys_of(PROMPT))
    tracked = pool.track()
    pool.loads.count_hit(tracked, pool.loads.hold_hit(tracked, 4) or 0)
    stats = pool.engine.stats()
    assert (stats.lookups.results["full"], stats.lookups.hit_blocks) == (1, 11)


def test_asking_again_holds_nothing_twice() -> None:
    pool = Pool(KINDS["window"], [*keys_of(PROMPT), *keys_of(PROMPT, WINDOW)])
    tracked = pool.track()
    assert pool.loads.hold_hit(tracked, 0) == 24
    hit, lookups = tracked.load.hit, pool.engine.stats().lookups.seconds
    for _ in range(5):
        assert pool.loads.hold_hit(tracked, 0) == 24
    assert tracked.load.hit is hit
    assert pool.engine.stats().lookups.seconds == lookups
    assert pool.leases == 1
    assert pool.held == {*keys_of(PROMPT)[:12], *keys_of(PROMPT, WINDOW)[10:12]}


def test_a_local_prefix_that_grew_is_served_from_what_is_held() -> None:
    pool = Pool(present=keys_of(PROMPT))
    tracked = pool.track()
    pool.loads.hold_hit(tracked, 4)
    hit = tracked.load.hit
    assert pool.loads.hold_hit(tracked, 10) == 16
    assert tracked.load.hit is hit
    assert (tracked.load.start, pool.leases) == (10, 1)


def test_a_local_prefix_that_shrank_is_looked_up_again() -> None:
    pool = Pool(present=keys_of(PROMPT))
    tracked = pool.track()
    assert pool.loads.hold_hit(tracked, 10) == 16
    assert pool.loads.hold_hit(tracked, 4) == 22
    assert pool.held == set(keys_of(PROMPT)[2:])
    assert (tracked.load.start, pool.leases) == (4, 1)


def test_a_local_prefix_beyond_the_hit_releases_it() -> None:
    pool = Pool(present=keys_of(PROMPT)[:5])
    tracked = pool.track()
    assert pool.loads.hold_hit(tracked, 0) == 10
    assert pool.loads.hold_hit(tracked, 10) == 0
    assert (tracked.load.hit, pool.leases) == (None, 0)


@pytest.mark.parametrize("held", [False, True])
def test_a_local_prefix_within_a_block_is_always_a_miss(held: bool) -> None:
    """Its last block belongs to others too: nothing is loaded into it."""
    pool = Pool(present=keys_of(PROMPT))
    tracked = pool.track()
    if held:
        pool.loads.hold_hit(tracked, 0)
    assert pool.loads.hold_hit(tracked, 5) == 0
    assert pool.leases == 0


def test_a_hit_of_nothing_but_the_start_of_a_chunk_loads_nothing_and_is_none() -> None:
    pool = Pool(KINDS["chunked alone"])
    tracked = pool.track(PROMPT[:9])
    assert pool.loads.hold_hit(tracked, 0) == 0
    assert tracked.load.hit is None


def test_a_request_that_continues_with_another_prompt_is_looked_up_by_that() -> None:
    pool = Pool(present=[*keys_of("abcdefghi"), *keys_of("abXYefghi")])
    tracked = pool.track("abcdefghi")
    assert pool.loads.hold_hit(tracked, 0) == 8
    pool.loads.release_hit(tracked)
    tracked.request.tokens = "abXYefghi"  # type: ignore[attr-defined]
    assert pool.loads.hold_hit(tracked, 0) == 8
    assert pool.held == set(keys_of("abXYefghi"))


def test_a_request_with_a_hit_counts_once_when_it_is_admitted() -> None:
    pool = Pool(KINDS["two block sizes"], [*keys_of(PROMPT, KVGroup(0, 4, 2)), *keys_of(PROMPT, LARGE)])
    tracked = pool.track()
    for _ in range(3):
        assert pool.loads.hold_hit(tracked, 0) == 24
    assert pool.engine.stats().lookups.query_blocks == 0
    pool.loads.count_hit(tracked, 24)
    stats = pool.engine.stats()
    assert (stats.lookups.query_blocks, stats.lookups.hit_blocks, stats.lookups.results["full"]) == (2, 2, 1)


def test_a_request_with_nothing_to_find_counts_as_no_lookup() -> None:
    pool = Pool()
    tracked = pool.track("ab")
    pool.loads.hold_hit(tracked, 0)
    pool.loads.count_hit(tracked, 0)
    assert pool.engine.stats().lookups.results == {"full": 0, "partial": 0, "miss": 0}


@pytest.mark.parametrize(
    ("fetched", "count"),
    [
        ((), 0),
        ((range(4, 8),), 4),
        ((range(6), range(14, 20)), 4),
        ((range(8, 12), range(4, 10), range(6, 8)), 8),
        ((range(40),), 12),
    ],
)
def test_tokens_that_the_tier_has_brought_are_counted_once(fetched: tuple[range, ...], count: int) -> None:
    assert Hit(0, 20, Lease(1), fetched=fetched).fetched_tokens(4, 16) == count
