"""`kvstow events`, `doctor` and `plot` against a real server."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.cli.terminal import Terminal

from kvstow_api.history import FIGURES, METRICS, HistoryView, NowView, SampleView, lines_of, now_of
from kvstow_api.views.doctor import DoctorView, FindingView
from kvstow_service.cli.plot import METRICS as OFFERED
from kvstow_service.cli.sparkline import sparkline, squeeze


def test_events_are_one_line_each(run: Any, host: Any) -> None:
    run("bypass", "--load", "--server", host.url)
    outcome = run("events", "--type", "change", "--limit", "1", "--server", host.url)
    assert outcome.exit_code == 0
    assert "change" in outcome.stdout
    assert "path=/v1/bypass" in outcome.stdout
    assert datetime.fromisoformat(outcome.stdout[:25]).utcoffset() is not None  # says its zone


def test_events_for_programs(run: Any, host: Any) -> None:
    run("bypass", "--load", "--server", host.url)
    only = ("events", "--type", "change", "--limit", "1", "--server", host.url, "-o")
    as_json, as_yaml = json.loads(run(*only, "json").stdout), yaml.safe_load(run(*only, "yaml").stdout)
    assert as_json == as_yaml
    assert (as_json["type"], as_json["data"]["method"]) == ("change", "PUT")


def test_an_unknown_event_type_is_refused(run: Any, host: Any) -> None:
    assert run("events", "--type", "weather", "--server", host.url).exit_code == 2


def test_events_resume_after_a_lost_connection(
    run: Any, make_host: Any, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    uds = tmp_path / "admin.sock"
    first = make_host(uds=uds)
    events = ("events", "--server", f"unix:{uds}", "--type", "change", "--type", "lost")
    with Terminal(*events, environ=child_environ) as it:
        run("bypass", "--off", "--server", first.url)
        it.until("path=/v1/bypass")
        first.stop()
        second = make_host(uds=uds)
        run("undrain", "--server", second.url)
        it.until("lost")  # another life of the server has other events
        it.until("path=/v1/drain")
        it.type("\x03")
        assert it.end() == 0


FINDING = FindingView(
    check="memory",
    severity="error",
    what="it is too small",
    why="it stops",
    fix="make it larger",
    evidence={"gib": 2.0},
)


def diagnosis(*findings: FindingView) -> DoctorView:
    return DoctorView(
        checked=datetime(2026, 1, 1, tzinfo=UTC),
        healthy=not findings,
        findings=list(findings),
        checks=["memory"],
        skipped={"clocks": "no rank has told its time"},
    )


def test_doctor_exits_0_for_a_healthy_server(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_api.client.Client.send", lambda self, call: diagnosis())
    outcome = run("doctor", "--server", host.url)
    assert (outcome.exit_code, outcome.stdout) == (0, "1 check, 0 findings\n")


def test_doctor_shows_findings_with_fixes_and_exits_1(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_api.client.Client.send", lambda self, call: diagnosis(FINDING))
    outcome = run("doctor", "--server", host.url, "-o", "wide")
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines() == [
        "error  it is too small",
        "  why  it stops",
        "  fix  make it larger",
        "  memory: gib 2",
        "",
        "1 check, 1 finding",
        "skipped: clocks: no rank has told its time",
    ]


def test_doctor_reports_a_server_that_is_not_ready(run: Any, host: Any) -> None:
    host.ranks[1].state = "failed"
    host.ranks[1].report()
    outcome = run("doctor", "--server", host.url)
    assert outcome.exit_code == 1
    assert "error  /readyz fails at ranks: rank 1 is failed" in outcome.stdout


def test_doctor_works_against_a_real_server(run: Any, host: Any) -> None:
    outcome = run("doctor", "--server", host.url, "-o", "json")
    view = json.loads(outcome.stdout)
    assert outcome.exit_code == (0 if view["healthy"] else 1)


START = datetime(2026, 1, 1, tzinfo=UTC)


def sample(number: int, **counters: int) -> SampleView:
    return SampleView(time=START + timedelta(seconds=5 * number), **counters)


SAMPLES = [
    sample(0, usable_slots=10),
    sample(1, usable_slots=10, query_blocks=10, hit_blocks=5, load_bytes=5 << 20, used_slots=5),
    sample(2, usable_slots=10, query_blocks=10, hit_blocks=5, load_bytes=15 << 20, used_slots=10),
    sample(3, usable_slots=10, query_blocks=2, hit_blocks=2, load_bytes=1 << 20, used_slots=1),  # another life
]
HISTORY = HistoryView(pool="host", interval_seconds=5.0, now=now_of(SAMPLES[:3]), items=SAMPLES)


def points(metric: str, line: int = 0) -> tuple[float | None, ...]:
    return lines_of(METRICS[metric], HISTORY.items)[line].points


def test_points_are_rates_between_samples() -> None:
    assert points("hit-ratio") == (0.5, None, None)
    assert points("bandwidth") == (1 << 20, 2 << 20, None)
    assert points("bandwidth", 1) == (0.0, 0.0, 0.0)
    assert points("usage") == (0.5, 1.0, 0.1)
    assert lines_of(METRICS["usage"], HISTORY.items[:1])[0].points == ()


def test_now_covers_ten_seconds_and_every_metric_is_defined_once() -> None:
    now = now_of([sample(n, query_blocks=10 * n, hit_blocks=n * n, evicted_blocks=n**3) for n in range(5)])
    assert now.seconds == 10.0
    assert now.hit_ratio == (16 - 4) / 20
    assert now.evicted_blocks_per_second == (64 - 8) / 10
    assert (now_of([]).seconds, now_of([]).hit_ratio, now_of(SAMPLES[:1]).load_bytes_per_second) == (0.0, None, None)
    assert {field.name for field in fields(NowView)} == {"seconds", *FIGURES}
    assert {figure for metric in METRICS.values() for figure in metric.lines.values()} == set(FIGURES)


def test_the_hit_ratio_now_ignores_old_samples() -> None:
    def hits(*hits_of_samples: int) -> float | None:
        return now_of(
            [sample(n, query_blocks=2 * hits, hit_blocks=hits) for n, hits in enumerate(hits_of_samples)]
        ).hit_ratio

    assert hits() is None
    assert hits(0, 1) == 0.5
    assert hits(0, 1, 1) == 0.5
    assert hits(0, 1, 1, 1) is None


def test_a_sparkline_has_gaps_and_a_fixed_width() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 10, 1.0) == "▁▅ █"
    assert sparkline([0.0, 1.0, 1.0], 2) == "██"
    assert sparkline([], 5) == ""
    assert squeeze([1.0, 3.0, None, None, 5.0, 7.0], 3) == [2.0, None, 6.0]


@pytest.fixture
def plot(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("kvstow_api.client.Client.send", lambda self, call: HISTORY)
    return lambda *arguments: run("plot", *arguments, "--server", host.url)


def test_every_metric_can_be_plotted(plot: Any) -> None:
    assert set(OFFERED) == set(METRICS)
    for metric in METRICS:
        assert plot(metric).exit_code == 0


def test_a_plot_shows_the_current_and_the_highest_value(plot: Any) -> None:
    loads, stores = plot("bandwidth").stdout.splitlines()
    assert loads.startswith("loads   ▅█")
    assert "now 1.5 MiB/s  highest 2 MiB/s" in loads
    assert "highest 0 B/s" in stores


def test_since_limits_the_samples(plot: Any) -> None:
    assert len(json.loads(plot("usage", "--since", "5s", "-o", "json").stdout)["items"]) == 2
    assert "nothing yet" in plot("usage", "--since", "0").stdout


@pytest.mark.parametrize("metric", ["hit-ratio", "blocks"])
def test_a_picture_is_drawn(plot: Any, tmp_path: Path, metric: str) -> None:
    path = tmp_path / "figure.png"
    assert plot(metric, "--png", str(path)).stdout == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_unwritable_picture_is_an_error(plot: Any, tmp_path: Path) -> None:
    outcome = plot("usage", "--png", str(tmp_path / "none" / "figure.png"))
    assert outcome.exit_code == 1
    assert "cannot be written" in outcome.stderr


def test_without_matplotlib_there_is_a_hint(plot: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.dates", None)
    outcome = plot("usage", "--png", str(tmp_path / "figure.png"))
    assert outcome.exit_code == 1
    assert "hint: pip install 'kvstow[plot]'" in outcome.stderr
