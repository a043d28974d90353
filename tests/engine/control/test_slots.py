from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.slots import SlotMap


def test_free_neighbours_are_allocated_together() -> None:
    slots = SlotMap()
    slots.set_limit(6)
    assert slots.allocate(4) == [0, 1, 2, 3]
    slots.deallocate([1, 2])
    assert slots.allocate(4) == [4, 5, 1, 2]
    assert slots.free == 0


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "limit"]), st.integers(0, 9))))
def test_counts_follow_the_slots(steps: list[tuple[str, int]]) -> None:
    slots = SlotMap()
    used: list[int] = []
    for action, number in steps:
        if action == "allocate":
            given_out = slots.allocate(min(number, slots.free))
            assert not set(given_out) & set(used)
            assert all(slot < slots.limit for slot in given_out)
            used += given_out
        elif action == "release":
            slots.deallocate(used[:number])
            del used[:number]
        else:
            slots.set_limit(number)
        assert slots.used_slots() == set(used)
        assert slots.counted() == (slots.free, slots.in_service)
        assert slots.leaving == sum(slot >= slots.limit for slot in used)
        assert slots.free == slots.limit - sum(slot < slots.limit for slot in used)
