from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.policy import ArcPolicy, EvictionPolicy, Links, LruPolicy, RecencyList

NUM_SLOTS = 8


class Pool:
    """A policy over a few slots, with the keys that an index would hold for it."""

    def __init__(self, name: str) -> None:
        links = Links()
        links.grow(NUM_SLOTS)
        self.keys: list[bytes | None] = [None] * NUM_SLOTS
        self.policy: EvictionPolicy = (
            LruPolicy(links) if name == "lru" else ArcPolicy(RecencyList(links), links, self.keys)
        )
        self.policy.set_capacity(NUM_SLOTS)
        self.links = links

    def use(self, key: bytes) -> bool:
        """A hit uses the block, a miss stores it, evicting as needed. True on a hit."""
        if key in self.keys:
            slot = self.keys.index(key)
            self.policy.detach([slot])
            self.policy.attach([slot])
            return True
        slot = self.keys.index(None) if None in self.keys else self.policy.evict(1)[0]
        self.keys[slot] = key
        self.policy.admit([slot])
        return False


@pytest.fixture(params=["lru", "arc"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def test_a_policy_holds_what_it_admitted(pool: Pool) -> None:
    pool.policy.admit([0, 1, 2])
    assert sorted(pool.policy) == [0, 1, 2]
    assert len(pool.policy) == 3


def test_evicted_slots_are_gone(pool: Pool) -> None:
    pool.policy.admit([0, 1, 2])
    assert pool.policy.evict(2) == [2, 1]
    assert list(pool.policy) == [0]


def test_eviction_gives_no_more_than_there_is(pool: Pool) -> None:
    pool.policy.admit([0])
    assert pool.policy.evict(5) == [0]
    assert pool.policy.evict(1) == []


def test_a_detached_slot_is_never_evicted(pool: Pool) -> None:
    pool.policy.admit([0, 1])
    pool.policy.detach([1])
    assert pool.policy.evict(2) == [0]
    pool.policy.attach([1])
    assert pool.policy.evict(2) == [1]


def test_used_slots_outlive_unused_ones(pool: Pool) -> None:
    pool.policy.admit([0, 1, 2])
    pool.policy.detach([2])
    pool.policy.attach([2])
    assert pool.policy.evict(2) == [1, 0]


def test_refreshed_slots_are_evicted_last_and_the_first_of_them_last_of_all(pool: Pool) -> None:
    for slots in ([0, 1], [2, 3], [4, 5]):
        pool.policy.admit(slots)
    pool.policy.refresh([0, 1, 2, 3])
    assert pool.policy.evict(6) == [5, 4, 3, 2, 1, 0]


def test_use_equals_detach_and_attach(pool: Pool) -> None:
    other = Pool(pool.policy.name)
    for each in (pool, other):
        for slots in ([0, 1, 2], [3, 4], [5, 6, 7]):
            each.policy.admit(slots)
        each.policy.detach([3])
        each.policy.attach([3])
    for slots in ([1, 2], [3, 4, 5], [3, 4, 5]):
        pool.policy.use(slots)
        other.policy.detach(slots)
        other.policy.attach(slots)
        assert list(pool.policy) == list(other.policy)
    assert pool.policy.evict(8) == other.policy.evict(8)


def test_refresh_does_not_count_as_a_second_use() -> None:
    """A scan whose blocks are refreshed flushes ARC no more than any other scan."""
    pool = Pool("arc")
    hot = [bytes([1, n]) for n in range(4)]
    for key in hot * 3:
        pool.use(key)
    for n in range(200):
        pool.use(b"scan" + bytes([n]))
        pool.policy.refresh([pool.keys.index(b"scan" + bytes([n]))])
    assert sum(key in pool.keys for key in hot) == 4


def test_hand_over_gives_all_slots_in_order_of_eviction(pool: Pool) -> None:
    pool.policy.admit([0, 1, 2])
    pool.policy.detach([2])
    pool.policy.attach([2])
    expected = list(pool.policy)
    assert list(pool.policy.hand_over()) == expected


@given(st.sampled_from(["lru", "arc"]), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 15)), max_size=80))
def test_no_slot_is_lost_or_doubled(name: str, steps: list[tuple[int, int]]) -> None:
    pool = Pool(name)
    detached: list[int] = []
    for action, number in steps:
        if action <= 3:
            key = bytes([number])
            evictable = len(pool.policy)
            if key in pool.keys:
                if pool.keys.index(key) not in detached:
                    pool.use(key)
            elif evictable or None in pool.keys:
                pool.use(key)
        elif action == 4 and len(pool.policy):
            slot = list(pool.policy)[number % len(pool.policy)]
            pool.policy.detach([slot])
            detached.append(slot)
        elif action == 6:
            pool.policy.refresh(list(pool.policy)[: number % 4])
        elif detached:
            pool.policy.attach([detached.pop()])
        held = [slot for slot, key in enumerate(pool.keys) if key is not None and slot not in detached]
        assert sorted(pool.policy) == held
        assert len(pool.policy) == len(held)


def run_scan(pool: Pool) -> int:
    """Hot keys that survive a long scan of keys that are used once."""
    hot = [bytes([1, n]) for n in range(4)]
    for key in hot * 3:
        pool.use(key)
    for n in range(200):
        pool.use(b"scan" + bytes([n]))
    return sum(key in pool.keys for key in hot)


def test_a_scan_flushes_lru_but_not_arc() -> None:
    assert run_scan(Pool("lru")) == 0
    assert run_scan(Pool("arc")) == 4


def test_arc_learns_that_recent_blocks_are_worth_more() -> None:
    pool = Pool("arc")
    for n in range(NUM_SLOTS):
        pool.use(bytes([n]))
    for n in range(4):
        pool.use(bytes([n]))  # four blocks are frequent now
    for n in range(NUM_SLOTS, NUM_SLOTS + 4):
        pool.use(bytes([n]))  # evicts the once-used 4..7, whose ghosts stay
    for n in range(4, 8):
        pool.use(bytes([n]))  # each ghost met says: the recent list is too short
    for n in range(20, 24):
        pool.use(bytes([n]))
    survivors = [n for n in range(4) if bytes([n]) in pool.keys]
    assert len(survivors) < 4, "frequent blocks must make room once recency has proved itself"


def test_arc_remembers_at_most_one_ghost_a_slot() -> None:
    pool = Pool("arc")
    for n in range(250):
        pool.use(bytes([n]))
    assert isinstance(pool.policy, ArcPolicy)
    assert pool.policy.num_ghosts <= NUM_SLOTS


def shrink_with_ghosts() -> tuple[Pool, ArcPolicy]:
    """A pool of frequent blocks and ghosts that is about to shrink to two slots."""
    pool = Pool("arc")
    for n in [*range(NUM_SLOTS), *range(NUM_SLOTS), *range(20, 20 + NUM_SLOTS)]:
        pool.use(bytes([n]))
    assert isinstance(pool.policy, ArcPolicy)
    assert pool.policy.num_ghosts > 4
    pool.policy.set_capacity(2)
    return pool, pool.policy


@pytest.mark.parametrize("call", ["evict", "detach"])
def test_after_a_shrink_each_call_of_arc_forgets_as_much_as_it_was_given(call: str) -> None:
    _, policy = shrink_with_ghosts()
    while policy.num_ghosts > 2:
        ghosts, (slot, *_) = policy.num_ghosts, policy
        if call == "evict":
            policy.evict(1)
        else:
            policy.detach([slot])
        assert ghosts - 4 <= policy.num_ghosts < ghosts
