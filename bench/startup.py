"""Start times of `kvstow serve`: until it answers, and until its first memory is populated."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.machine import wait_until_quiet
from bench.report import Table, verdict
from kvstow.bytesize import parse_size
from kvstow.memory.limits import MemoryLimits

_DEADLINE_SECONDS = 60.0
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 8.0
_BAR_SECONDS = 1.0
_ROOT = Path(__file__).parents[1]

_SERVER_IMPORTS = "import kvstow_service.cli, kvstow_service.node.nodeprocess"


def run(pools: Sequence[str], repeats: int, say: Callable[[str], None]) -> list[Table]:
    """Return the medians of `repeats` starts for each size of memory."""
    imports = {code: median(_import_seconds(code) for _ in range(repeats)) for code in ("pass", _SERVER_IMPORTS)}
    say("start-up, imports")
    rows = []
    for pool in pools:
        shortage = MemoryLimits().shortage(parse_size(pool))
        if shortage is not None:
            rows.append([pool, "not run: " + shortage.message, *[""] * 3])
            continue
        wait_until_quiet(_PATIENCE_SECONDS)
        starts = [_start(pool) for _ in range(repeats)]
        say(f"start-up, {pool}")
        rows.append(_row(pool, starts, imports[_SERVER_IMPORTS]))
    head = ["memory", "first /livez", "of it imports", "first memory", "bar"]
    return [Table("Time from process start", head, rows), _import_table(imports)]


def _row(pool: str, starts: Sequence[tuple[float, float]], imports: float) -> list[str]:
    alive, populated = (median(values) for values in zip(*starts, strict=True))
    bar = f"/livez within {_BAR_SECONDS:g} s, {verdict(alive <= _BAR_SECONDS)}"
    return [pool, *(f"{seconds:.2f} s" for seconds in (alive, imports, populated)), bar]


def _import_table(imports: dict[str, float]) -> Table:
    bare, server = imports.values()
    rows = [
        ["Python itself", f"{bare:.2f} s"],
        ["FastAPI, uvicorn, pydantic, click and the service", f"{server - bare:.2f} s"],
    ]
    return Table("Imports alone, in a process of their own", ["", "time"], rows)


def _import_seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_ROOT)
    return time.perf_counter() - started


def _start(pool: str) -> tuple[float, float]:
    """Return the seconds until /livez answers, and until some memory is populated. Then the process is killed, without
    waiting for the rest."""
    started = time.perf_counter()
    with _serving(pool) as (process, port):
        for _ in _polls(process):
            if _get(port, "/livez") is not None:
                break
        alive = time.perf_counter() - started
        for _ in _polls(process):
            answer = _get(port, "/v1/readiness")
            if answer is not None and json.loads(answer)["memory"]["populated_bytes"]:
                break
        return alive, time.perf_counter() - started


@contextmanager
def _serving(pool: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = _free_port()
    with TemporaryDirectory() as folder:
        sockets = ("--port", str(port), "--attach-socket", f"{folder}/attach.sock")
        command = [sys.executable, "-m", "kvstow_service", "serve", "--memory", pool, *sockets]
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process, port
        finally:
            process.kill()
            process.wait()


def _polls(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Yield until the deadline. Raises `RuntimeError` after it, or if the process has ended."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"kvstow serve ended with {process.returncode}")
        yield
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"kvstow serve was not there after {_DEADLINE_SECONDS:g} s")


def _get(port: int, path: str) -> bytes | None:
    """Return the body of a 200, or None if nothing answers yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        return body if answer.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
