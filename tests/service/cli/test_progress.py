"""The progress of commands that take long."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.doubles.fakes import FakeClock

from kvstow_service.cli import app, progress
from kvstow_service.cli.progress import LINE_SECONDS, ProgressBars
from kvstow_service.replay.trace import TraceShape, generate_trace


def test_without_a_terminal_a_line_is_written_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with ProgressBars(clock) as bars:
        bar = bars.bar("replaying", 4000)
        for done in range(0, 2000, 500):
            bar(done)
            clock.advance(LINE_SECONDS / 2)
        bar(2000)
        bars.say("something else")
    assert capsys.readouterr().err == "replaying: 1,000/4,000\nreplaying: 2,000/4,000\nsomething else\n"


def test_on_a_terminal_there_are_bars_and_no_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    clock = FakeClock()
    with ProgressBars(clock) as bars:
        bar = bars.bar("replaying", 4000)
        clock.advance(LINE_SECONDS)
        bar(1000, "1,000 requests")
    assert "1,000 requests" in screen.getvalue()
    assert "replaying: " not in screen.getvalue()


@pytest.mark.parametrize("words", [("--slot-size", "1KiB", "--pool-slots", "100"), ("--sizes", "100")])
def test_a_replay_without_a_terminal_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{request.to_line()}\n" for request in generate_trace(TraceShape(sessions=3))))
    outcome = CliRunner().invoke(app, ["replay", str(path), *words])
    assert outcome.exit_code == 0, outcome.stderr
    assert re.search(r"^replaying: (\d+)/\1$", outcome.stderr, re.MULTILINE)
