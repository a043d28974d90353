from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tests.engine.conftest import Eventually

from kvstow.errors import TierUnavailableError
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.lookups import LookupTable, LookupThread, StoreAnswers
from kvstow.tier.store import ObjectName


def name_of(key: bytes) -> ObjectName:
    return ObjectName("f", key, 0, 2)


@pytest.fixture
def store() -> ControlledStore:
    store = ControlledStore()
    store.put(str(name_of(b"\0\0a")), b"x")
    return store


@pytest.fixture
def table() -> LookupTable:
    return LookupTable(FakeClock())


@pytest.fixture
def lookups(store: ControlledStore, table: LookupTable) -> Iterator[LookupThread]:
    thread = LookupThread(table, store.open_lookups())
    yield thread
    store.lookups.open()
    thread.close()


def results(lookups: LookupThread, count: int, eventually: Eventually) -> list[StoreAnswers]:
    found: list[StoreAnswers] = []

    def have_come() -> bool:
        found.extend(lookups.take_results())
        return len(found) >= count

    eventually(have_come)
    return found


KEYS = [b"\0\0a", b"\0\0b"]


def test_the_answer_comes_on_another_thread(
    lookups: LookupThread, table: LookupTable, store: ControlledStore, eventually: Eventually
) -> None:
    store.lookups.shut()
    table.want(KEYS, 0)
    assert lookups.ask(name_of)
    assert not lookups.ask(name_of), "one question at a time"
    store.lookups.wait_arrived(1)
    assert table.present_until(KEYS, 0) == (0, False)
    store.lookups.open()
    (result,) = results(lookups, 1, eventually)
    assert (result.is_probe, result.keys, result.error) == (False, 2, None)
    assert table.present_until(KEYS, 0) == (1, True)
    assert store.batches == [("exists", 2)]


@pytest.mark.parametrize("error", [TierUnavailableError("no master"), ZeroDivisionError("defect")])
def test_no_answer_means_that_nothing_was_found(
    lookups: LookupThread,
    table: LookupTable,
    store: ControlledStore,
    eventually: Eventually,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.error = error
    table.want(KEYS, 0)
    with caplog.at_level(logging.ERROR, "kvstow.tier"):
        lookups.ask(name_of)
        (result,) = results(lookups, 1, eventually)
    assert str(error) in (result.error or "")
    assert ("unexpected" in caplog.text) == isinstance(error, ZeroDivisionError)
    assert [table.present_until(KEYS, at) for at in (0, 1)] == [(0, True), (1, True)]
    store.error = None
    table.want([b"\0\0c"], 0)
    lookups.ask(name_of)
    assert results(lookups, 1, eventually)[0].error is None, "the thread goes on"


def test_too_few_answers_are_none(
    lookups: LookupThread, table: LookupTable, store: ControlledStore, eventually: Eventually
) -> None:
    store.max_answers = 1
    table.want(KEYS, 0)
    lookups.ask(name_of)
    (result,) = results(lookups, 1, eventually)
    assert "1 answers for 2 objects" in (result.error or "")
    assert [table.present_until(KEYS, at) for at in (0, 1)] == [(0, True), (1, True)]
    lookups.probe("f")
    assert results(lookups, 1, eventually)[0].error is None, "the thread goes on"


def test_what_is_known_by_then_is_not_asked(
    lookups: LookupThread, table: LookupTable, store: ControlledStore, eventually: Eventually
) -> None:
    inquiry = table.want(KEYS, 0)
    table.note(KEYS, present=True)
    assert lookups.ask(name_of)
    (result,) = results(lookups, 1, eventually)
    assert (result.is_probe, result.keys, result.error) == (False, 0, None)
    assert not inquiry.is_open
    assert store.batches == []


def test_a_probe_asks_for_one_object(lookups: LookupThread, store: ControlledStore, eventually: Eventually) -> None:
    lookups.probe("f")
    (result,) = results(lookups, 1, eventually)
    assert (result.is_probe, result.keys, result.error) == (True, 1, None)


def test_closing_ends_the_thread_and_is_idempotent(lookups: LookupThread) -> None:
    lookups.close()
    lookups.close()
