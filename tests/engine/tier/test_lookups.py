from __future__ import annotations

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow.tier.lookups import ABSENT_SECONDS, PRESENT_SECONDS, LookupTable, Question


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> LookupTable:
    return LookupTable(clock)


def asked(table: LookupTable) -> Question:
    question = table.take_question()
    assert question is not None
    return question


def test_one_question_has_all_that_is_wanted_once(table: LookupTable) -> None:
    assert table.presence([b"a", b"b"]) == [None, None]
    assert table.presence([b"b", b"c"]) == [None, None]
    assert asked(table).keys == (b"a", b"b", b"c")
    assert table.take_question() is None


def test_a_second_question_waits_for_the_first_answer(table: LookupTable) -> None:
    table.presence([b"a"])
    first = asked(table)
    assert table.presence([b"a", b"b"]) == [None, None]
    assert table.take_question() is None
    table.answer(first, [True])
    assert table.presence([b"a"]) == [True]
    assert asked(table).keys == (b"b",), "what is being asked is not asked again"


def test_answers_are_kept_for_a_while(table: LookupTable, clock: FakeClock) -> None:
    table.presence([b"a", b"b"])
    table.answer(asked(table), [True, False])
    clock.advance(ABSENT_SECONDS - 0.1)
    assert table.presence([b"a", b"b"]) == [True, False]
    assert table.take_question() is None
    clock.advance(0.1)
    assert table.presence([b"a", b"b"]) == [True, None]
    clock.advance(PRESENT_SECONDS - ABSENT_SECONDS)
    assert table.presence([b"a"]) == [None]


def test_what_is_known_without_asking_replaces_an_answer(table: LookupTable) -> None:
    table.presence([b"a", b"b"])
    table.answer(asked(table), [True, False])
    table.note([b"a"], present=False)
    table.note([b"b"], present=True)
    assert table.presence([b"a", b"b"]) == [False, True]


def test_answers_from_before_keys_changed_their_meaning_are_ignored(table: LookupTable) -> None:
    table.presence([b"a"])
    before = asked(table)
    table.forget()
    table.presence([b"b"])
    table.answer(before, [True])
    assert table.presence([b"a"]) == [None]
    assert asked(table).keys == (b"b", b"a")


def test_old_answers_make_room(table: LookupTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.tier.lookups._MAX_ANSWERS", 2)
    table.note([b"a", b"b", b"c"], present=True)
    assert table.presence([b"a", b"b", b"c"]) == [None, True, True]
