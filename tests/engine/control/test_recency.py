from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.control.policy import Links, RecencyList

NUM_SLOTS = 12


def make_list(*lists_of_slots: list[int]) -> RecencyList:
    links = Links()
    links.grow(NUM_SLOTS)
    order = RecencyList(links)
    for slots in lists_of_slots:
        order.append(slots)
    return order


def test_the_first_of_a_prefix_is_the_hottest() -> None:
    assert list(make_list([3, 1, 2])) == [2, 1, 3]


def test_later_appends_are_hotter() -> None:
    assert list(make_list([0, 1], [2, 3])) == [1, 0, 3, 2]


def test_a_removed_run_returns_as_a_whole() -> None:
    order = make_list([0, 1, 2], [3], [4, 5])
    order.remove([0, 1, 2])
    order.append([0, 1, 2])
    assert list(order) == [3, 5, 4, 2, 1, 0]


def test_refreshing_a_prefix_joins_the_pieces_that_it_was_stored_in(monkeypatch: pytest.MonkeyPatch) -> None:
    order = make_list([0, 1, 2], [9], [3, 4, 5], [8])
    order.refresh([0, 1, 2, 3, 4, 5])
    assert list(order) == [9, 8, 5, 4, 3, 2, 1, 0]
    cuts: list[tuple[int, int]] = []
    cut = RecencyList._cut

    def counted(self: RecencyList, hot: int, cold: int) -> None:
        cuts.append((hot, cold))
        cut(self, hot, cold)

    monkeypatch.setattr(RecencyList, "_cut", counted)
    order.refresh([0, 1, 2, 3, 4, 5])
    assert cuts == [(0, 5)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "remove", "refresh", "pop"]), st.lists(st.integers(0, NUM_SLOTS - 1), max_size=6)
        )
    )
)
def test_it_behaves_like_a_plain_list(steps: list[tuple[str, list[int]]]) -> None:
    order = make_list()
    model: list[int] = []
    for action, numbers in steps:
        slots = list(dict.fromkeys(numbers))
        if action == "append":
            slots = [slot for slot in slots if slot not in model]
            order.append(slots)
            model += reversed(slots)
        elif action in ("remove", "refresh"):
            slots = [slot for slot in slots if slot in model]
            getattr(order, action)(slots)
            model = [slot for slot in model if slot not in slots]
            model += reversed(slots) if action == "refresh" else []
        else:
            assert order.pop_coldest(len(slots)) == model[: len(slots)]
            model = model[len(slots) :]
        assert list(order) == model
        assert len(order) == len(model)
