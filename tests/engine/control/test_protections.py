from __future__ import annotations

from collections.abc import Callable
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.engine import OffloadEngine
from kvstow.control.slots import Protections
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks, store_keys


def size(protections: Protections) -> int:
    """Entries in all its records."""
    ending = protections._slots_ending
    return (
        len(protections._end_of)
        + len(protections._ends)
        + len(ending)
        + sum(map(len, ending.values()))
        + len(protections._counts)
    )


def test_renewing_protections_takes_no_memory(make_engine: Callable[..., OffloadEngine], clock: FakeClock) -> None:
    engine = make_engine(slots=64)
    keys = [bytes([number]) for number in range(64)]
    store_keys(engine, make_ranks(engine), keys)
    engine.admin.protect(keys, 1000.0)
    before = size(engine.pool.index._protections)
    for number in range(1000):
        clock.advance(0.5)
        engine.admin.protect(keys, 1000.0 if number % 2 else 900.0 - number / 2)  # later, and earlier than before
    assert size(engine.pool.index._protections) == before
    engine.check_integrity()


def test_protections_that_end_together_return_in_the_order_of_protecting() -> None:
    protections = Protections()
    for slot in (7, 3, 5, 1):
        protections.add(slot, 10.0)
    assert protections.due(9.0, 4) == []
    assert protections.due(10.0, 4) == [7, 3, 5, 1]
    assert protections.due(10.0, 2) == [5, 1], "the end of a prefix first: it is evicted first"


def test_a_prefix_whose_protections_end_keeps_its_order(
    make_engine: Callable[..., OffloadEngine], clock: FakeClock
) -> None:
    engine = make_engine(slots=4)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [b"a", b"b", b"c", b"d"])
    engine.admin.protect([b"a", b"b", b"c", b"d"], 1.0)
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
def test_protections_behave_like_a_plain_dict(steps: list[tuple[str, int, float]]) -> None:
    protections, expected = Protections(), dict[int, float]()
    for what, slot, end in steps:
        if what == "add":
            protections.add(slot, end)
            expected[slot] = end
        elif what == "discard":
            assert protections.discard(slot) == (expected.pop(slot, None) is not None)
        else:
            over = sorted(slot for slot, until in expected.items() if until <= end < inf)
            if end < inf:
                assert sorted(protections.due(end, 100)) == over
                assert len(protections.due(end, 2)) == min(2, len(over))
        assert protections.is_consistent()
        assert protections.slots() == expected.keys()
        assert protections.count_from(slot) == sum(each >= slot for each in expected)
        assert protections.between(slot, slot + 500) == sorted(each for each in expected if slot <= each < slot + 500)
        assert protections.unprotected([slot, slot + 1]) == [each for each in (slot, slot + 1) if each not in expected]
