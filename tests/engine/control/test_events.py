from __future__ import annotations

from kvstow.control.events import EventLog


def test_readers_keep_their_own_place() -> None:
    log = EventLog(buffer=10)
    for n in range(4):
        log.add("stored", (bytes([n]),))
    page = log.read(after=0, limit=3)
    assert ([event.sequence for event in page.events], page.cursor, page.lost) == ([1, 2, 3], 3, 0)
    page = log.read(after=page.cursor)
    assert ([event.sequence for event in page.events], page.cursor, page.lost) == ([4], 4, 0)
    assert log.read(after=4) == ([], 4, 0)


def test_a_reader_that_lags_is_told_how_much_it_lost() -> None:
    log = EventLog(buffer=2)
    for n in range(5):
        log.add("removed", (bytes([n]),), "capacity")
    page = log.read(after=1)
    assert ([event.sequence for event in page.events], page.lost) == ([4, 5], 2)


def test_nothing_is_no_event() -> None:
    log = EventLog(buffer=2)
    log.add("stored", ())
    assert log.last_sequence == 0
    assert log.read(0) == ([], 0, 0)
