from __future__ import annotations

from collections.abc import Sequence

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


def presence(table: LookupTable, keys: Sequence[bytes]) -> list[bool | None]:
    """What is known of each key by itself."""
    found: list[bool | None] = []
    for key in keys:
        end, is_final = table.present_until([key], 0)
        found.append(True if end else False if is_final else None)
    return found


def test_one_question_has_all_that_is_wanted_once(table: LookupTable) -> None:
    first, second = table.want([b"x", b"a", b"b"], 1), table.want([b"b", b"c"], 0)
    question = asked(table)
    assert table.unknown(question) == [b"a", b"b", b"c"]
    assert table.take_question() is None
    table.answer(question, [b"a", b"b", b"c"], [True, False, True])
    assert not first.is_open
    assert not second.is_open
    assert presence(table, [b"x", b"a", b"b", b"c"]) == [None, True, False, True]


def test_a_second_question_waits_for_the_first_answer(table: LookupTable) -> None:
    table.want([b"a"], 0)
    first = asked(table)
    inquiry = table.want([b"a", b"b"], 0)
    assert table.take_question() is None
    before = table.version
    table.answer(first, [b"a"], [True])
    assert table.version > before, "who wants to know looks again"
    assert table.present_until([b"a", b"b"], 0) == (1, False)
    assert inquiry.is_open
    assert table.unknown(asked(table)) == [b"b"], "what is known is not asked again"


def test_what_nobody_wants_to_know_any_more_is_not_asked(table: LookupTable) -> None:
    table.want([b"a"], 0).is_open = False
    assert table.take_question() is None
    table.want([b"a"], 0).is_open = False
    table.want([b"b"], 0)
    assert table.unknown(asked(table)) == [b"b"]


def test_a_run_ends_at_the_first_key_that_is_absent_or_unknown(table: LookupTable) -> None:
    keys = [b"a", b"b", b"c", b"d", b"e"]
    table.note(keys[:2], present=True)
    table.note(keys[2:3], present=True)
    table.note(keys[3:4], present=False)
    assert table.present_until(keys, 0) == (3, True)
    assert table.present_until(keys, 3) == (3, True)
    assert table.present_until(keys, 4) == (4, False)
    assert table.present_until(keys[:3], 1) == (3, True), "that is all of them"


def test_answers_are_kept_for_a_while(table: LookupTable, clock: FakeClock) -> None:
    table.want([b"a", b"b"], 0)
    table.answer(asked(table), [b"a", b"b"], [True, False])
    clock.advance(ABSENT_SECONDS - 0.1)
    assert presence(table, [b"a", b"b"]) == [True, False]
    table.want([b"a", b"b"], 0)
    question = asked(table)
    assert table.unknown(question) == []
    clock.advance(0.1)
    assert presence(table, [b"a", b"b"]) == [True, None]
    assert table.unknown(question) == [b"b"]
    clock.advance(PRESENT_SECONDS - ABSENT_SECONDS)
    assert presence(table, [b"a"]) == [None]


def test_what_is_known_without_asking_replaces_an_answer(table: LookupTable) -> None:
    table.want([b"a", b"b"], 0)
    table.answer(asked(table), [b"a", b"b"], [True, False])
    table.note([b"a"], present=False)
    table.note([b"b"], present=True)
    assert presence(table, [b"a", b"b"]) == [False, True]


@pytest.mark.parametrize("piece", [1, 2, 128])
def test_answers_are_noted_piece_by_piece(table: LookupTable, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr("kvstow.tier.lookups._PIECE", piece)
    keys = [bytes([number]) for number in range(5)]
    table.want(keys, 0)
    table.answer(asked(table), keys, [True, True, True, False, True])
    assert table.present_until(keys, 0) == (3, True)
    assert presence(table, keys) == [True, True, True, False, True]


def test_old_answers_make_room(table: LookupTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.tier.lookups._MAX_ANSWERS", 2)
    table.note([b"a", b"b", b"a", b"c"], present=True)
    assert presence(table, [b"a", b"b", b"c"]) == [True, None, True]


def test_what_the_store_has_is_believed_for_5_s() -> None:
    clock = FakeClock()
    table = LookupTable(clock)
    table.note([b"k"], present=True)
    clock.advance(4.9)
    assert table.known([b"k"]) == [True]
    clock.advance(0.1)
    assert table.known([b"k"]) == [None]
