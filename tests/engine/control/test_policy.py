"""The order of eviction: a list for each class of uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.policy import EvictionOrder, Links
from kvstow.control.slots import SlotTimes
from kvstow.control.uses import LOG_USES, Uses

NUM_SLOTS = 8


class Pool:
    """Slots in one order; a use of attached slots takes them out and returns them, as a pool does."""

    def __init__(self, k: float = 0.0, num_slots: int = NUM_SLOTS) -> None:
        links, times = Links(), SlotTimes()
        links.grow(num_slots)
        times.grow(num_slots)
        self.uses = Uses(times, k)
        self.uses.set_num_slots(num_slots)
        self.order = EvictionOrder(links, self.uses)
        self.now = 0.0

    def attach(self, slots: list[int], uses: int = 1) -> None:
        self.now += 1.0
        for _ in range(uses):
            self.uses.count([slots])
        self.uses.times.mark_used([slots], self.now)
        self.order.attach(slots)

    def use(self, slots: list[int]) -> None:
        self.order.detach(slots)
        self.attach(slots)


@pytest.fixture(params=[0.0, 4.0])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def test_it_holds_what_it_was_given(pool: Pool) -> None:
    pool.attach([0, 1, 2])
    assert sorted(pool.order) == [0, 1, 2]
    assert len(pool.order) == 3


def test_evicted_slots_are_gone_and_the_first_of_a_chain_goes_last(pool: Pool) -> None:
    pool.attach([0, 1, 2])
    assert pool.order.evict(2) == [2, 1]
    assert list(pool.order) == [0]


def test_eviction_gives_no_more_than_there_is(pool: Pool) -> None:
    pool.attach([0])
    assert pool.order.evict(5) == [0]
    assert pool.order.evict(1) == []


def test_a_detached_slot_is_never_evicted(pool: Pool) -> None:
    pool.attach([0, 1])
    pool.order.detach([1])
    assert pool.order.evict(2) == [0]
    pool.order.attach([1])
    assert pool.order.evict(2) == [1]


def test_refreshed_slots_are_evicted_last_and_the_first_of_them_last_of_all(pool: Pool) -> None:
    for slots in ([0, 1], [2, 3], [4, 5]):
        pool.attach(slots)
    pool.uses.times.mark_used([[0, 1, 2, 3]], pool.now + 1)
    pool.order.refresh([0, 1, 2, 3])
    assert pool.order.evict(6) == [5, 4, 3, 2, 1, 0]


def run_scan(pool: Pool) -> int:
    """How many of four blocks that were used thrice survive a long scan of blocks that are used once."""
    hot = [0, 1, 2, 3]
    pool.uses.note_ages([4], 2.0)
    pool.attach(hot, uses=3)
    pool.attach([4, 5, 6, 7])
    for _ in range(50):
        slots = pool.order.evict(4)
        pool.uses.note_ages(slots, pool.now + 1)
        for slot in slots:  # new content
            pool.uses.admit([slot])
        pool.attach(slots)
        hot = [slot for slot in hot if slot not in slots]
    return len(hot)


def test_a_scan_flushes_lru_but_not_a_pool_that_counts_uses() -> None:
    assert run_scan(Pool()) == 0
    assert run_scan(Pool(k=64.0)) == 4


def test_a_change_of_k_takes_effect_with_the_next_eviction() -> None:
    pool = Pool()
    pool.attach([0], uses=4)
    pool.attach([1])
    pool.uses.age = 10.0
    assert list(pool.order) == [0, 1]
    pool.uses.k = 1.0
    assert list(pool.order) == [1, 0]
    assert pool.order.evict(1) == [1]


def test_of_equal_worth_the_blocks_with_fewer_uses_go_first() -> None:
    """They may depend on the others, and never the other way round."""
    pool = Pool()
    pool.attach([0, 1, 2, 3])
    pool.order.detach([0, 1])
    pool.uses.count([[0, 1]])
    pool.order.attach([0, 1])
    assert pool.uses.classes([0, 1, 2, 3]) == bytes([2, 2, 0, 0])
    assert pool.order.evict(4) == [3, 2, 1, 0]


STEPS = st.lists(
    st.tuples(st.sampled_from(["use", "evict", "hold"]), st.lists(st.integers(0, 15), max_size=6)), max_size=40
)


@given(STEPS)
def test_with_k_0_it_is_exactly_lru(steps: list[tuple[str, list[int]]]) -> None:
    pool, model = Pool(num_slots=16), list[int]()
    for action, numbers in steps:
        slots = list(dict.fromkeys(numbers))
        if action == "use":
            known, new = [slot for slot in slots if slot in model], [slot for slot in slots if slot not in model]
            pool.order.detach(known)
            for slot in new:
                pool.uses.admit([slot])
            pool.attach(slots)
            model = [slot for slot in model if slot not in slots] + slots[::-1]
        elif action == "evict":
            pool.uses.note_ages(model[: len(numbers)], pool.now)
            assert pool.order.evict(len(numbers)) == model[: len(numbers)]
            model = model[len(numbers) :]
        else:
            known = [slot for slot in slots if slot in model]
            pool.order.detach(known)
            model = [slot for slot in model if slot not in known]
        assert list(pool.order) == model
        assert len(pool.order) == len(model)


@given(STEPS, st.sampled_from([0.0, 0.5, 4.0]), st.floats(0, 8))
def test_the_coldest_slot_with_the_least_worth_is_evicted(
    steps: list[tuple[str, list[int]]], k: float, age: float
) -> None:
    pool = Pool(k, num_slots=16)
    pool.uses.age = age
    lists: dict[int, list[int]] = {}
    for action, numbers in steps:
        slots = list(dict.fromkeys(numbers))
        known = [slot for slot in slots if any(slot in each for each in lists.values())]
        if action == "evict":
            expected = []
            for _ in numbers:
                heads = [
                    (pool.uses.times.used_at(each[0]) + k * age * LOG_USES[number], number)
                    for number, each in lists.items()
                    if each
                ]
                if heads:
                    expected.append(lists[min(heads)[1]].pop(0))
            order = list(pool.order)
            assert pool.order.evict(len(numbers)) == expected == order[: len(expected)]
            continue
        pool.order.detach(known)
        lists = {number: [slot for slot in each if slot not in known] for number, each in lists.items()}
        if action == "use":
            pool.attach(slots)
            for slot in reversed(slots):
                lists.setdefault(pool.uses.classes([slot])[0], []).append(slot)
        assert sorted(pool.order) == sorted(slot for each in lists.values() for slot in each)
