"""The demo end to end, at a smaller scale."""

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvstow_service.demo import __main__ as demo
from kvstow_service.demo.story import Claim, Scale
from kvstow_service.replay.trace import TraceShape

SMALL = Scale(
    memory="64MiB",
    ranks=1,
    slot="16KiB",
    shape=TraceShape(sessions=15, turns=4, shared_prompts=2),
    flags=("--extent-size", "8MiB", "--pin-chunk", "8MiB"),
)


@pytest.mark.process
def test_everything_that_the_demo_claims_is_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the checkout need not be installed
    monkeypatch.setattr(sys, "argv", ["demo", "--svg", str(tmp_path / "demo.svg")])
    status = demo.main(SMALL)
    shown = capsys.readouterr().out
    print(shown)
    assert status == 0
    assert "All 8 claims hold." in shown
    assert "</svg>" in (tmp_path / "demo.svg").read_text()


@pytest.mark.process
def test_the_demo_shows_why_the_service_did_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main(Scale(memory="1KiB")) == 1
    assert (
        "demo failed: the service has ended:\nkvstow serve: --memory 1KiB is less than 2 MiB" in capsys.readouterr().out
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_one_claim_that_does_not_hold_fails_the_demo(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    assert demo.print_claims([Claim("a", "1", True)], console)
    assert not demo.print_claims([Claim("a", "1", True), Claim("b", "2", False)], console)
    assert "1 of 2 claims do not hold." in out.getvalue()
    assert "NO" in out.getvalue()
