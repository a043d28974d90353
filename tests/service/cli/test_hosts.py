"""Commands against a node service that runs as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.cli.terminal import Terminal

from kvstow_service.replay.trace import TraceShape, generate_trace

SOCKET = "admin.sock"


@pytest.fixture
def node(tmp_path: Path, child_environ: dict[str, str], eventually: Any) -> Iterator[str]:
    """A `kvstow serve` with an engine that replays a trace."""
    trace, attach = tmp_path / "trace.jsonl", tmp_path / "node" / "attach.sock"
    trace.write_text("".join(f"{request.to_line()}\n" for request in generate_trace(TraceShape(sessions=500))))
    environ = {**child_environ, "KVSTOW_SERVER": "unix:/x"}  # of no use to either

    def started(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvstow_service", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)

    sockets = (f"--admin-socket={tmp_path}/{SOCKET}", f"--attach-socket={attach}")
    service = started("serve", "--memory=64MiB", "--port=0", "--shutdown-delay=0", *sockets)
    replay: subprocess.Popen[bytes] | None = None
    try:
        eventually(attach.is_socket, "the socket at which engines attach")
        flags = ("--ranks=2", "--slot-size=64KiB", "--rate=20", "--concurrency=4")
        replay = started("replay", str(trace), f"--attach=unix:{attach}", *flags)
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{tmp_path}/{SOCKET}")) as client:

            def has_blocks() -> bool:
                return any(pool["slots"]["cached"] for pool in client.get("http://kvstow/v1/pools").json()["items"])

            eventually(has_blocks, "the first blocks")
        yield f"unix:{tmp_path}/{SOCKET}"
    finally:
        if replay is not None:
            replay.terminate()
            replay.wait(60)
        service.terminate()
        status = service.wait(60)
        service.kill()
    assert status == 0


# httpcore leaves the socket that it could not connect to the garbage collector
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def test_the_ordinary_work_of_an_operator(run: Any, node: str, child_environ: dict[str, str]) -> None:
    def kvstow(*arguments: str, code: int = 0) -> str:
        outcome = run(*arguments, "--server", node)
        assert outcome.exit_code == code, (arguments, outcome.output)
        return str(outcome.stdout)

    kvstow("wait", "--for=pinned", "--timeout=60s")
    for noun in ("pools", "ranks", "blocks", "transfers", "operations", "log-levels"):
        assert kvstow("get", noun)
    assert "lookups" in kvstow("describe", "stats")
    assert "reason" in kvstow("describe", "server")
    kvstow("describe", "rank", "2", code=4)
    kvstow("config", "set", "policy=lru")
    kvstow("evict", "--slots", "1", "--dry-run")
    kvstow("purge", "--all", "--yes")
    kvstow("bypass", "--load", "--ttl", "1m")
    kvstow("drain", "--yes")
    kvstow("wait", "--for=drained", "--timeout=60s")
    kvstow("wait", "--for=ready", "--timeout=0", code=3)
    kvstow("undrain")
    kvstow("wait", "--for=ready", "--timeout=60s")
    assert "change" in kvstow("events", "--type", "change", "--limit", "1")
    json.loads(run("doctor", "-o", "json", "--server", node).stdout)
    assert json.loads(kvstow("describe", "server", "-o", "json"))["server"]["mode"] == "node"
    with Terminal("top", "--server", node, environ=child_environ) as terminal:
        terminal.until("SESSION")
        terminal.until("evictions")
        terminal.type("q")
        assert terminal.end() == 0
    with httpx.Client(transport=httpx.HTTPTransport(uds=node.removeprefix("unix:"))) as browser:
        page = browser.get("http://kvstow/")
        assert (page.status_code, len(page.content) < 100_000) == (200, True)
