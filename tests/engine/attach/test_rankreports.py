"""The one form of a rank's report and of its desired state."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from tests.doubles.rank import ready_report

from kvstow.attach.calls import Desired, Report
from kvstow.attach.rankreports import ReportNumbers
from kvstow.errors import ProtocolError
from kvstow.messages import DesiredState, RankReport

REPORT = ready_report(4096, 8)


def packed(change: dict[str, Any], clock: Any = 1.5) -> bytes:
    """A report with these fields, as a rank of another version might send it."""
    return msgspec.msgpack.encode((clock, {**asdict(REPORT), **change}))


def desired(value: Any) -> DesiredState:
    return Desired.unpack(msgspec.msgpack.encode(value)).desired


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rank": True}, r"report: Expected `int`, got `bool` - at `\$\.rank`"),
        ({"rank": -1}, "RankReport.rank is -1; allowed: numbers of 0 or more"),
        ({"rank": 1 << 63}, "RankReport.rank is 9223372036854775808"),
        ({"boot_id": None}, r"Expected `str`, got `null` - at `\$\.boot_id`"),
        ({"state": "fine"}, r"Invalid enum value 'fine' - at `\$\.state`"),
        ({"pin_elapsed_seconds": float("nan")}, "pin_elapsed_seconds is nan; allowed: numbers of 0 or more"),
        ({"error": 5}, r"Expected `str \| null`, got `int` - at `\$\.error`"),
        ({"error": "x" * 4097}, "RankReport.error is 'x.*; allowed: .* 4096 printable characters"),
        ({"numa_bytes": [1]}, r"Expected `object`, got `array` - at `\$\.numa_bytes`"),
        ({"pin_failures": {"driver": -1}}, "RankReport.pin_failures is {'driver': -1}"),
        ({"pin_failures": {str(n): 1 for n in range(65)}}, "RankReport.pin_failures is "),
        ({"more": 1}, r"unknown fields \['more'\]"),
    ],
)
def test_a_report_of_the_wrong_shape_is_refused_by_field(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        Report.unpack(packed(change))


@pytest.mark.parametrize("clock", [None, "1", -1.0, float("nan"), float("inf"), 1e12])
def test_a_clock_that_is_none_is_refused(clock: object) -> None:
    with pytest.raises(ProtocolError, match=r"report: Expected .* - at `\$\[0\]`"):
        Report.unpack(packed({}, clock))


def test_an_incomplete_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="desired state: Object missing required field `engine_id`"):
        desired({"capacity_slots": 1})
    with pytest.raises(ProtocolError, match="desired state: Expected `object`, got `array`"):
        desired([])
    with pytest.raises(ProtocolError, match=r"Expected `bool`, got `int` - at `\$\.paused`"):
        desired({"engine_id": "e", "capacity_slots": 1, "paused": 1, "number": 1})
    for payload in (b"", b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode((1.5, {}))):
        with pytest.raises(ProtocolError, match="report: "):
            Report.unpack(payload)


@pytest.mark.parametrize("change", [{"host": "a\u202eb"}, {"boot_id": "a\nb"}, {"numa_bytes": {"\x1b[2J": 1}}])
def test_text_in_a_report_is_printable(change: dict[str, Any]) -> None:
    """The end of a line would forge one of the log."""
    with pytest.raises(ProtocolError, match=f"RankReport.{next(iter(change))} is ") as refused:
        Report.unpack(packed(change))
    assert str(refused.value).isprintable()


def test_a_text_that_cannot_be_encoded_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match="report: "):
        Report.now(replace(REPORT, host="a\ud800")).pack()


def test_the_error_in_a_report_may_have_several_lines() -> None:
    message = Report.now(replace(REPORT, error="the driver says:\nout of memory"))
    assert Report.unpack(message.pack()).report.error == "the driver says: out of memory"


def test_reports_name_their_process_and_are_numbered() -> None:
    numbers, made = ReportNumbers(), RankReport.without_pool(0, "boot", "starting", 64)
    first, second = numbers.number(made), numbers.number(made)
    assert (first.number, second.number) == (1, 2)
    assert first.sender == second.sender != ReportNumbers().number(made).sender
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
