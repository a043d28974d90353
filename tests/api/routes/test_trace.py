"""Recording a pool over HTTP."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Serve
from tests.api.fakenode import FakeNode
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys
from tests.waiting import eventually

from kvstow.control import recording
from kvstow.control.engine import OffloadEngine
from kvstow_api.client import ApiError, Client

CHAIN = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
LIMITS: dict[str, Any] = {"seconds": 60.0, "max_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_api.streams.TRACE_POLL_SECONDS", 0.005)


@contextmanager
def client_of(serve: Serve, folder: Path, **changes: Any) -> Iterator[Client]:
    serve(uds=folder / "admin.sock", **changes)
    with Client(f"unix:{folder / 'admin.sock'}") as client:
        yield client


def test_requests_come_as_lines_and_the_last_line_says_why_it_ended(
    serve: Serve, engine: OffloadEngine, tmp_path: Path
) -> None:
    with client_of(serve, tmp_path) as client:
        lines = client.record("host", seconds=60.0, max_bytes=400)
        assert next(lines) == "", "the server is there"
        use_keys(engine, CHAIN, looked_up=(2, 6))
        first = json.loads(next(filter(None, lines)))
        assert (first["looked_up"], len(first["hash_ids"])) == ([2, 6], 8)
        assert (first["input_length"], first["output_length"]) == (6 * 16, 2 * 16)
        use_keys(engine, CHAIN)
        rest = [json.loads(line) for line in lines if line]
        assert [len(one.get("hash_ids", ())) for one in rest] in ([0], [8, 0])
        assert rest[-1]["recording"]["end"] == "size"
        eventually(lambda: engine.pool.requests.recording is None)


def test_it_ends_by_time(serve: Serve, engine: OffloadEngine, tmp_path: Path) -> None:
    with client_of(serve, tmp_path) as client:
        *_, last = client.record("host", seconds=0.02, max_bytes=1 << 20)
    assert json.loads(last) == {"recording": {"end": "time", "requests": 0, "blocks": 0}}


def test_it_ends_with_its_connection(serve: Serve, engine: OffloadEngine, tmp_path: Path) -> None:
    with client_of(serve, tmp_path) as client:
        lines = client.record("host", **LIMITS)
        next(lines)
        assert engine.pool.requests.recording is not None
        with pytest.raises(ApiError, match="is being recorded already") as refused:
            next(client.record("host", **LIMITS))
        assert refused.value.status == 409
        lines.close()
        eventually(lambda: engine.pool.requests.recording is None)


def test_a_client_that_does_not_read_ends_it_and_delays_nobody(
    serve: Serve, engine: OffloadEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 20_000)
    chain = [hashlib.sha256(number.to_bytes(2, "big")).digest() for number in range(2000)]
    path = tmp_path / "admin.sock"
    with client_of(serve, tmp_path), socket.socket(socket.AF_UNIX) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(str(path))
        body = json.dumps({"seconds": 600.0, "max_bytes": 1 << 30}).encode()
        head = "POST /v1/pools/host/trace HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: engine.pool.requests.recording is not None)
        made = engine.pool.requests.recording
        assert made is not None
        while not made.is_over:
            use_keys(engine, chain)
        received = bytearray()
        while b'"recording"' not in received:
            received += deaf.recv(1 << 20)
        assert b'{"recording":{"end":"slow",' in received


def test_a_pool_of_a_node_is_recorded(serve: Serve, tmp_path: Path) -> None:
    node = FakeNode(FakeClock(100.0))
    engine, other = node.attach("a"), node.attach("b")
    with client_of(serve, tmp_path, directory=node) as client:
        lines = client.record("a", **LIMITS)
        next(lines)
        use_keys(other.control, CHAIN[:3])
        use_keys(engine.control, CHAIN)
        assert len(json.loads(next(filter(None, lines)))["hash_ids"]) == 8
        with pytest.raises(ApiError, match="there is no pool"):
            next(client.record("c", **LIMITS))


def test_a_stranger_records_nothing(serve: Serve, engine: OffloadEngine) -> None:
    listeners = serve()
    with Client(listeners.url) as client, pytest.raises(ApiError) as refused:
        next(client.record("host", **LIMITS))
    assert refused.value.status == 403
    assert engine.pool.requests.recording is None


def use_often(engine: OffloadEngine) -> None:
    for _ in range(50):
        use_keys(engine, CHAIN[:2])


def test_no_thread_waits_while_a_recording_is_read(serve: Serve, engine: OffloadEngine, tmp_path: Path) -> None:
    """Uses go on on other threads, and each is a line."""
    with client_of(serve, tmp_path) as client:
        lines = client.record("host", **LIMITS)
        next(lines)
        threads = [threading.Thread(target=use_often, args=(engine,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        found = [next(filter(None, lines)) for _ in range(150)]
        for thread in threads:
            thread.join()
    assert len({tuple(json.loads(line)["hash_ids"]) for line in found}) == 1
