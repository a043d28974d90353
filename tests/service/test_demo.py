"""The demo end to end, with a smaller pool and trace."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvstow_service import demo
from kvstow_service.replay.generate import TraceShape
from kvstow_service.replay.offload import PoolFigures
from kvstow_service.replay.result import ReplayResult, Tally


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the checkout need not be installed
    monkeypatch.setattr(demo, "_POOL", "8MiB")
    monkeypatch.setattr(demo, "_SLOT", "32KiB")
    monkeypatch.setattr(demo, "_PIN", ("--pin-chunk", "2MiB", "--pin-pause", "500ms"))
    monkeypatch.setattr(demo, "_SHAPE", TraceShape(sessions=20))


@pytest.mark.process
@pytest.mark.usefixtures("small")
def test_the_demo_verifies_every_byte_while_the_pool_pins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--svg", str(tmp_path / "demo.svg")])
    assert demo.main() == 0
    shown = capsys.readouterr().out
    for probe in ("/livez", "/readyz"):
        assert f"{probe} is 200 after" in shown
    assert "slots are usable after" in shown
    assert "16 MiB of 16 MiB pinned, 256 slots usable" in shown
    assert "Every loaded byte was correct" in shown
    assert "</svg>" in (tmp_path / "demo.svg").read_text()


@pytest.mark.process
@pytest.mark.usefixtures("small")
def test_the_demo_shows_why_the_service_did_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "_POOL", "1KiB")
    assert demo.main() == 1
    assert (
        "the service ended with exit code 2:\nkvstow serve: --pool-size 1KiB is less than one slot"
        in capsys.readouterr().out
    )


def result(*, loaded: int, verified: int, mismatches: int = 0) -> ReplayResult:
    tally = Tally(loaded_bytes=loaded, verified_bytes=verified, mismatches=mismatches)
    return tally.freeze(PoolFigures(1, "lru", 0), seconds=1.0, ranks=1)


@pytest.mark.parametrize(
    ("found", "exit_code", "ok"),
    [
        (result(loaded=10, verified=10), 0, True),
        (result(loaded=10, verified=10), 1, False),
        (result(loaded=10, verified=9), 0, False),
        (result(loaded=10, verified=10, mismatches=1), 0, False),
        (result(loaded=0, verified=0), 0, False),
    ],
)
def test_only_a_complete_verification_and_a_clean_exit_are_a_success(
    found: ReplayResult, exit_code: int, ok: bool
) -> None:
    assert demo._verdict(found, exit_code, Console()) is ok
