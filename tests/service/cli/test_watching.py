"""`kvstow events` and `doctor` against a real server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.cli.terminal import Terminal

from kvstow_api.answers import BLOCK_EVENTS, EVENT_TYPES, ConditionView, DoctorView
from kvstow_service.cli.board import sparkline


def test_an_event_is_one_line_or_a_document_for_programs(kvstow: Any) -> None:
    kvstow("bypass", "--load")

    def event(*form: str) -> str:
        outcome = kvstow("events", "--type", "change", "--limit", "1", *form)
        assert outcome.exit_code == 0
        return str(outcome.stdout)

    (line,) = event().splitlines()
    assert "PUT /v1/bypass by " in line
    assert datetime.fromisoformat(line[:25]).utcoffset() is not None  # says its zone
    (wide,) = event("-o", "wide").splitlines()
    assert "path=/v1/bypass" in wide
    assert " id=" in wide
    document = json.loads(event("-o", "json"))
    assert document == yaml.safe_load(event("-o", "yaml"))
    assert (document["type"], document["data"]["method"]) == ("change", "PUT")


def test_an_unknown_event_type_is_refused(kvstow: Any) -> None:
    assert kvstow("events", "--type", "weather").exit_code == 2


def test_the_help_of_events_names_all_types(run: Any) -> None:
    said = " ".join(run("events", "--help").stdout.split())
    assert f"[{'|'.join(EVENT_TYPES)}]" in said
    assert f"which are `{'` and `'.join(BLOCK_EVENTS)}`, come only" in said


def test_events_resume_after_a_lost_connection(
    run: Any, make_host: Any, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    uds = tmp_path / "admin.sock"
    first = make_host(uds=uds)
    events = ("events", "--server", f"unix:{uds}", "--type", "change", "--type", "lost")
    with Terminal(*events, environ=child_environ) as it:
        run("bypass", "--off", "--server", first.url)
        it.until("PUT /v1/bypass")
        first.stop()
        second = make_host(uds=uds)
        run("undrain", "--server", second.url)
        it.until("lost")  # another life of the server has other events
        it.until("/v1/drain by")
        it.type("\x03")
        assert it.end() == 0


CONDITION = ConditionView(
    name="memory",
    severity="error",
    what="it is too small",
    why="it stops",
    fix="make it larger",
    evidence={"gib": 2.0},
)


def diagnosis(*conditions: ConditionView) -> DoctorView:
    return DoctorView(
        time=datetime(2026, 1, 1, tzinfo=UTC),
        healthy=not conditions,
        conditions=list(conditions),
        checked=["memory"],
        skipped={"clocks": "no rank has told its time"},
    )


def test_doctor_exits_0_for_a_healthy_server(kvstow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_api.client.Client.call", lambda self, route, body: diagnosis())
    outcome = kvstow("doctor")
    assert (outcome.exit_code, outcome.stdout) == (0, "nothing is wrong; the doctor has checked 1 kind of conditions\n")


def test_doctor_shows_conditions_with_fixes_and_exits_1(kvstow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_api.client.Client.call", lambda self, route, body: diagnosis(CONDITION))
    outcome = kvstow("doctor", "-o", "wide")
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines() == [
        "error  it is too small",
        "  why  it stops",
        "  fix  make it larger",
        "  memory: gib 2",
        "",
        "1 condition; the doctor has checked 1 kind of conditions",
        "not checked: clocks: no rank has told its time",
    ]


def test_doctor_reports_a_server_that_is_not_ready(kvstow: Any, host: Any) -> None:
    host.ranks[1].state = "failed"
    host.ranks[1].report()
    outcome = kvstow("doctor")
    assert outcome.exit_code == 1
    assert "error  rank 1 is failed" in outcome.stdout


def test_a_sparkline_has_gaps_and_a_fixed_width() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 10, 1.0) == "▁▅ █"
    assert sparkline([0.0, 1.0, 1.0], 2, 1.0) == "██"
    assert sparkline([], 5, 1.0) == ""
