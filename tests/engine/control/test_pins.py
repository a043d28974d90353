from __future__ import annotations

from collections.abc import Callable
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.engine import OffloadEngine
from kvstow.control.pins import Pins
from kvstow.testing.clock import FakeClock
from kvstow.testing.rank import make_ranks, store_keys


def size(pins: Pins) -> int:
    """Entries in all its books."""
    ending = pins._slots_ending
    return len(pins._end_of) + len(pins._ends) + len(ending) + sum(map(len, ending.values())) + len(pins._counts)


def test_renewing_pins_takes_no_memory(make_engine: Callable[..., OffloadEngine], clock: FakeClock) -> None:
    engine = make_engine(slots=64)
    keys = [bytes([number]) for number in range(64)]
    store_keys(engine, make_ranks(engine), keys)
    engine.admin.pin(keys, 1000.0)
    before = size(engine._state.index._pins)
    for number in range(1000):
        clock.advance(0.5)
        engine.admin.pin(keys, 1000.0 if number % 2 else 900.0 - number / 2)  # later, and earlier than before
    assert size(engine._state.index._pins) == before
    engine.check_integrity()


def test_pins_that_end_together_go_back_in_the_order_of_pinning() -> None:
    pins = Pins()
    for slot in (7, 3, 5, 1):
        pins.add(slot, 10.0)
    assert pins.due(9.0, 4) == []
    assert pins.due(10.0, 4) == [7, 3, 5, 1]
    assert pins.due(10.0, 2) == [5, 1], "the end of a prefix first: it is evicted first"


def test_a_prefix_whose_pins_end_keeps_its_order(make_engine: Callable[..., OffloadEngine], clock: FakeClock) -> None:
    engine = make_engine(slots=4)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [b"a", b"b", b"c", b"d"])
    engine.admin.pin([b"a", b"b", b"c", b"d"], 1.0)
    clock.advance(2.0)
    store_keys(engine, ranks, [b"new"])
    assert engine.contains([b"a", b"b", b"c", b"d"]) == [True, True, True, False]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "discard", "due"]), st.integers(0, 3000), st.sampled_from([1.0, 2.0, 3.0, inf])
        ),
        max_size=60,
    )
)
def test_pins_are_what_a_plain_dict_says(steps: list[tuple[str, int, float]]) -> None:
    pins, expected = Pins(), dict[int, float]()
    for what, slot, end in steps:
        if what == "add":
            pins.add(slot, end)
            expected[slot] = end
        elif what == "discard":
            assert pins.discard(slot) == (expected.pop(slot, None) is not None)
        else:
            over = sorted(slot for slot, until in expected.items() if until <= end < inf)
            if end < inf:
                assert sorted(pins.due(end, 100)) == over
                assert len(pins.due(end, 2)) == min(2, len(over))
        assert pins.balances()
        assert pins.slots() == expected.keys()
        assert pins.count_from(slot) == sum(pinned >= slot for pinned in expected)
        assert pins.between(slot, slot + 500) == sorted(pinned for pinned in expected if slot <= pinned < slot + 500)
        assert pins.unpinned([slot, slot + 1]) == [each for each in (slot, slot + 1) if each not in expected]
