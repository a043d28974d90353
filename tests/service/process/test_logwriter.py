from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.doubles.fakes import FakeClock
from tests.waiting import eventually

from kvstow_service.process import logwriter
from kvstow_service.process.logwriter import LogWriter

_audit = logging.getLogger("kvstow.audit")


class Pipe(logging.Handler):
    """A full pipe: it takes no line until somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()
        self.entered = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        assert self.read.wait(30.0)
        self.lines.append(record.getMessage())


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    handler, parent = Pipe(), logging.getLogger("kvstow")
    level = parent.level
    parent.addHandler(handler)
    parent.setLevel(logging.INFO)
    yield handler
    handler.read.set()
    parent.removeHandler(handler)
    parent.setLevel(level)


LINES = 1000
"""How many lines may wait to be written, of the audit log and of all other logs."""


async def change(request: Request) -> PlainTextResponse:
    for number in range(int(request.query_params["lines"])):
        logging.getLogger("kvstow.server").info("line %d", number)
    return PlainTextResponse("done")


def test_a_blocked_log_stops_no_request(serving: Any, pipe: Pipe) -> None:
    lost: list[int] = []
    server, listeners = serving(Starlette(routes=[Route("/", change)]), log=LogWriter(lambda: lost.append(1)))
    with httpx.Client(base_url=listeners.url) as client:
        assert client.get("/?lines=1").text == "done"
        assert pipe.entered.wait(30.0)
        for _ in range(2):
            assert client.get(f"/?lines={LINES}").text == "done"
    assert len(lost) == LINES
    pipe.read.set()
    eventually(lambda: len(pipe.lines) == 1 + LINES + 1)
    server.stop()
    assert pipe.lines[2:] == [f"line {number}" for number in range(LINES)]
    assert pipe.lines[1] == f"dropped {LINES} log lines: the log is not read fast enough"


def test_lines_of_other_threads_are_written_on_their_threads(caplog: pytest.LogCaptureFixture) -> None:
    writer = LogWriter(lambda: pytest.fail("nothing is dropped"))
    guarded = threading.Thread(target=writer.start)
    guarded.start()
    guarded.join()
    try:
        _audit.error("of this thread")
        assert [record.message for record in caplog.records] == ["of this thread"]
    finally:
        writer.stop()


def test_waiting_lines_are_written_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    writer = LogWriter()
    writer.start()
    names = ["before"]
    _audit.error("of %s", names)
    names[0] = "after"
    writer.stop()
    writer.stop()
    assert [record.message for record in caplog.records] == ["of ['before']"]
    assert _audit.filters == []


def test_a_log_that_stays_blocked_does_not_keep_the_server_from_stopping(pipe: Pipe) -> None:
    writer = LogWriter()
    writer.start()
    for _ in range(2 * LINES + 2):
        _audit.error("nobody reads this")
    writer.stop()
    pipe.read.set()
    writer.stop()  # ends the thread


def test_lines_of_the_audit_log_have_room_of_their_own(pipe: Pipe) -> None:
    """A flood of other lines hides no change."""
    lost: list[int] = []
    writer = LogWriter(lambda: lost.append(1))
    writer.start()
    other = logging.getLogger("kvstow.server")
    other.warning("flood")
    assert pipe.entered.wait(30.0)
    for _ in range(LINES + 3):
        other.warning("flood")
    _audit.info("a change")
    assert len(lost) == 3
    pipe.read.set()
    writer.stop()
    dropped = "dropped 3 log lines: the log is not read fast enough"
    assert pipe.lines == ["flood", dropped, *["flood"] * LINES, "a change"]


def test_a_message_is_written_so_often_a_minute_and_the_next_line_says_how_many_were_not() -> None:
    clock = FakeClock()
    limit = logwriter.MessageLimit(clock)

    def lines(message: str, count: int = 1, level: int = logging.INFO) -> list[str]:
        records = [logging.LogRecord("kvstow.x", level, "", 0, message, (number,), None) for number in range(count)]
        return [record.getMessage() for record in records if limit.passes(record)]

    assert len(lines("session %s attached", 130)) == 100
    assert lines("session %s ends") == ["session 0 ends"]
    assert len(lines("session %s attached", 130, logging.DEBUG)) == 130
    clock.advance(60.0)
    assert lines("session %s attached", 2) == ["session 0 attached (30 more were suppressed)", "session 1 attached"]
    audited = [logging.LogRecord("kvstow.audit", logging.INFO, "", 0, "actor=%s", (1,), None) for _ in range(130)]
    assert all(limit.passes(record) for record in audited)


def test_what_is_known_of_messages_is_bounded_so_that_a_thousand_others_make_it_forget_one() -> None:
    limit = logwriter.MessageLimit(FakeClock())

    def passes(message: str) -> bool:
        return limit.passes(logging.LogRecord("kvstow.x", logging.INFO, "", 0, message, (), None))

    while passes("often"):
        pass
    for number in range(1000):
        assert passes(f"message {number}")
    assert passes("often")


def test_lines_of_all_modules_of_the_service_are_written_by_it() -> None:
    """Lines of a logger with another name would be written raw, and those below a warning would be lost."""
    service = Path(logwriter.__file__).parents[1]
    own = [path for path in service.rglob("*.py") if "connectors" not in path.parts]  # these are in an engine's process
    assert not [path for path in own if "getLogger(__name__)" in path.read_text()]
