"""The ordinary commands of an operator against a server inside an inference engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.cli.terminal import Terminal

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.testing.rank import make_ranks
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.embedded import EmbeddedAdmin

SOCKET = "admin.sock"


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server that vLLM's scheduler starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16, num_ranks=2, report_timeout=3600.0))
    make_ranks(engine)
    options = AdminOptions(port=0, uds=tmp_path / SOCKET)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    admin = EmbeddedAdmin(engine, options, identity="engine", mode="vllm", max_capacity_slots=16, environ=environ)
    admin.start()
    yield f"unix:{tmp_path}/{SOCKET}"
    admin.stop()


def check(run: Callable[..., Any], server: str, environ: dict[str, str]) -> dict[str, Any]:
    """The ordinary work of an operator. Returns the server's description."""

    def kvstow(*arguments: str, code: int = 0) -> str:
        outcome = run(*arguments, "--server", server)
        assert outcome.exit_code == code, (arguments, outcome.output)
        return str(outcome.stdout)

    kvstow("wait", "--for=pinned", "--timeout=60s")
    for noun in ("pools", "ranks", "blocks", "transfers", "operations", "log-levels"):
        assert kvstow("get", noun)
    assert "lookups" in kvstow("describe", "stats")
    assert "reason" in kvstow("describe", "server")
    kvstow("describe", "rank", "2", code=4)
    kvstow("config", "set", "policy=arc")
    kvstow("evict", "--slots", "1", "--dry-run")
    kvstow("purge", "--all", "--yes")
    kvstow("bypass", "--load", "--ttl", "1m")
    kvstow("drain", "--yes")
    kvstow("wait", "--for=drained", "--timeout=60s")
    kvstow("wait", "--for=ready", "--timeout=0", code=3)
    kvstow("undrain")
    kvstow("wait", "--for=ready", "--timeout=60s")
    assert "change" in kvstow("events", "--type", "change", "--limit", "1")
    json.loads(run("doctor", "-o", "json", "--server", server).stdout)
    for metric in ("hit-ratio", "bandwidth"):
        kvstow("plot", metric)
    with Terminal("top", "--server", server, environ=environ) as terminal:
        terminal.until("rank 1")
        terminal.until("Evictions")
        terminal.type("q")
        assert terminal.end() == 0
    with httpx.Client(transport=httpx.HTTPTransport(uds=server.removeprefix("unix:"))) as browser:
        page = browser.get("http://kvstow/")
        assert (page.status_code, len(page.content) < 15_000) == (200, True)
    info: dict[str, Any] = json.loads(kvstow("describe", "server", "-o", "json"))["server"]
    return info


# httpcore leaves the socket that it could not connect to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_a_server_inside_an_inference_engine(run: Any, embedded: str, child_environ: dict[str, str]) -> None:
    assert check(run, embedded, child_environ)["mode"] == "vllm"
