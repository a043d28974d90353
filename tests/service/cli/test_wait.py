"""`kvstow wait` against a real server."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock

from kvstow_service.cli.watching import Status, Waiting


def test_wait_returns_at_once_if_the_server_is_ready(kvstow: Any) -> None:
    outcome = kvstow("wait", "--for=ready", "--timeout=30s")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "ready: 16 of 16 slots are usable\n", "")


def test_pinned_needs_all_slots_and_ready_does_not(run: Any, make_host: Any) -> None:
    url = make_host(pinned=4).url
    assert run("wait", "--server", url).exit_code == 0
    outcome = run("wait", "--server", url, "--for", "pinned", "--timeout", "0")
    assert outcome.exit_code == 3
    assert "4 of 16 slots are usable" in outcome.stderr


def test_a_draining_server_is_drained_and_not_ready(kvstow: Any, host: Any) -> None:
    drained = ("wait", "--for=drained", "--timeout=0")
    outcome = kvstow(*drained)
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert "nothing is drained: new requests are served" in outcome.stderr
    host.engine.admin.drain("all", None)
    assert kvstow(*drained).exit_code == 0
    outcome = kvstow("wait", "--timeout=0")
    assert outcome.exit_code == 3
    assert "engine failed: the engine drains" in outcome.stderr


def test_wait_tolerates_a_server_that_has_not_started(
    make_host: Any, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    uds = tmp_path / "admin.sock"
    command = [sys.executable, "-m", "kvstow_service", "wait", "--server", f"unix:{uds}", "--timeout", "60s"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environ
    ) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("waiting: unix:")  # so it looked before there was a server
        make_host(uds=uds)
        assert waiting.wait(60) == 0
        assert waiting.stdout is not None
        assert waiting.stdout.read() == "ready: 16 of 16 slots are usable\n"


def test_wait_fails_at_once_if_access_is_denied(run: Any, make_host: Any, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("secret")
    (tmp_path / "viewer").write_text("other")
    url = make_host(token_file=tmp_path / "admin", viewer_token_file=tmp_path / "viewer").url
    outcome = run("wait", "--server", url, "--for=pinned")
    assert outcome.exit_code == 1
    assert "Unauthorized" in outcome.stderr
    assert "hint: give a valid token, --token-file" in outcome.stderr
    assert run("wait", "--server", url, "--for=pinned", "--token-file", str(tmp_path / "viewer")).exit_code == 0


@pytest.mark.parametrize("arguments", [["--for", "green"], ["--timeout", "soon"], ["--server", "kvstow:9595"]])
def test_invalid_arguments_are_usage_errors(run: Any, arguments: list[str]) -> None:
    assert run("wait", *arguments).exit_code == 2


def test_wait_says_why_memory_is_not_pinned(run: Any, make_host: Any) -> None:
    host = make_host(pinned=4)
    pinned = ("wait", "--server", host.url, "--for=pinned", "--timeout=0")
    host.engine.admin.pause_pinning(True)
    assert "pinning is paused: `kvstow pinning resume`" in run(*pinned).stderr
    host.ranks[1].state, host.ranks[1].error = "degraded", "no more memory"
    host.ranks[1].report()
    assert "4 of 16 slots are usable; rank 1 is degraded: no more memory" in run(*pinned).stderr


def test_progress_lines_are_rate_limited(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with Waiting(clock) as waiting:
        for _ in range(12):
            waiting.show(Status(False, f"at {clock():g} s"))
            clock.advance(1.0)
        waiting.show(Status(False, "at 10 s"))
    assert capsys.readouterr().err == "waiting: at 0 s\nwaiting: at 5 s\nwaiting: at 10 s\n"


def test_a_server_that_does_not_answer_is_named(run: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        outcome = run("wait", "--server", server, "--timeout=0", "--request-timeout=50ms")
    assert outcome.exit_code == 3
    assert f"{server} did not answer within " in outcome.stderr
