"""Requests to KVStow's admin server about a running engine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import dataclass
from typing import Any


def ask(port: int, path: str) -> Any:
    """GET. Raises `OSError` if nothing answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


def change(port: int, path: str, body: dict[str, Any]) -> Any:
    """PATCH. Raises `OSError` if nothing answers or the server refuses."""
    return _send(port, "PATCH", path, body, "application/merge-patch+json")


def purge(port: int, pool: str) -> Any:
    """Purge all blocks of a pool. Raises `OSError` if nothing answers or the server refuses."""
    return _send(port, "POST", f"/v1/pools/{pool}/purge", {"all": True}, "application/json")


def _send(port: int, method: str, path: str, body: dict[str, Any], kind: str) -> Any:
    """Send a request through the server's Unix socket, because over TCP it only reads."""
    (address,) = (one for one in ask(port, "/v1/info")["addresses"] if one.startswith("unix:"))
    connection = http.client.HTTPConnection("kvstow", timeout=5)
    connection.sock = socket.socket(socket.AF_UNIX)
    with closing(connection), connection.sock:
        connection.sock.settimeout(5)
        connection.sock.connect(address.removeprefix("unix:"))
        connection.request(method, path, json.dumps(body), {"content-type": kind})
        answer = connection.getresponse()
        if answer.status >= http.client.BAD_REQUEST:
            raise OSError(f"{method} {path}: {answer.status} {answer.read()!r}")
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_pinned(port: int, patience: float) -> float:
    """Wait until the pool is pinned. Returns the seconds that it took. Raises `TimeoutError`."""
    began = time.perf_counter()
    while not _is_pinned(port):
        if time.perf_counter() - began > patience:
            raise TimeoutError(f"the pool was not pinned within {patience:g} s")
        time.sleep(0.1)
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of the counters. Blocks and bytes are of one rank."""

    state: str
    ranks: list[str]
    usable_slots: int
    capacity_slots: int
    loads: int
    loaded_blocks: int
    stored_blocks: int
    stored_bytes: int
    evicted: dict[str, int]
    dropped: dict[str, int]
    errors: dict[str, int]
    pending: int


def summarize(port: int) -> Summary:
    stats, readiness = ask(port, "/v1/stats"), ask(port, "/v1/readiness")
    transfers = stats["transfers"]
    return Summary(
        state=readiness["state"],
        ranks=[rank["state"] for rank in readiness["ranks"]],
        usable_slots=readiness["usable_slots"],
        capacity_slots=readiness["capacity_slots"],
        loads=transfers["load"]["ok"],
        loaded_blocks=transfers["load"]["blocks"],
        stored_blocks=transfers["store"]["blocks"],
        stored_bytes=transfers["store"]["bytes"],
        evicted=_counted(stats["evictions"]),
        dropped=_counted({name: count for name, count in stats["stores"].items() if name != "stored"}),
        errors=_counted(
            {
                **stats["faults"]["errors"],
                "load failed": transfers["load"]["error"],
                "store failed": transfers["store"]["error"],
            }
        ),
        pending=transfers["pending"]["loads"] + transfers["pending"]["stores"],
    )


class PinWatch:
    """A thread that notes when the pool is pinned. It is a context manager. `pinned_at` is a time of
    `time.perf_counter`.

    It asks once a second, because more requests would be a load of their own.
    """

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pin-watch", daemon=True)
        self.pinned_at: float | None = None

    def __enter__(self) -> PinWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            if _is_pinned(self._port):
                self.pinned_at = time.perf_counter()
                return


def _is_pinned(port: int) -> bool:
    """Whether the pool is pinned. At first nothing may answer, because the server starts beside the engine."""
    try:
        readiness = ask(port, "/v1/readiness")
    except OSError:
        return False
    return bool(readiness["usable_slots"] >= readiness["capacity_slots"] > 0)


def _counted(counters: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counters.items() if count}
