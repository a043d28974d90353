"""Slow, idle, numerous or oversized clients cost bounded memory, and probes keep answering."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvstow_api.middleware import BodyMiddleware
from kvstow_service.admin.sockets import AdminSockets

IDLE = 1000
BODY_BYTES = 10 << 20
HEADER_BYTES = 50 << 20
ALLOWED_GROWTH = 64 << 20
_SOCKET_SECONDS = 60.0
_TOKEN = "Authorization: Bearer admin-token"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """With the token that `head` sends."""
    (tmp_path / "token").write_text("admin-token")
    return tmp_path / "token"


@pytest.fixture
def service(serve: Any, ranks: Any, token_file: Path) -> AdminSockets:
    listeners: AdminSockets = serve(startup_grace=0.0, token_file=token_file)
    return listeners


@pytest.fixture
def file_limit() -> Iterator[None]:
    """Room for both ends of the idle connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * IDLE + 500
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(service: AdminSockets) -> socket.socket:
    return socket.create_connection((service.host, service.port), _SOCKET_SECONDS)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def check_alive(service: AdminSockets) -> None:
    for probe in ("/livez", "/readyz"):
        assert httpx.get(f"{service.url}{probe}", timeout=_SOCKET_SECONDS).status_code == 200


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: kvstow", _TOKEN, "Content-Type: application/json", *lines, "", ""]
    ).encode()


def read_to_end(client: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_thousand_idle_connections_leave_room_for_probes(service: AdminSockets, file_limit: None) -> None:
    check_alive(service)
    before = resident_bytes()
    with ExitStack() as stack:
        for number in range(IDLE):
            idle = stack.enter_context(connect(service))
            if number % 2:
                idle.sendall(b"GET /v1/info HTTP/1.1\r\nHo")  # half a request
        check_alive(service)
        assert resident_bytes() - before < ALLOWED_GROWTH
    check_alive(service)


def test_bodies_of_ten_megabytes_are_refused_without_reading_them(service: AdminSockets) -> None:
    check_alive(service)
    before = resident_bytes()
    for declared in (f"Content-Length: {BODY_BYTES}", "Transfer-Encoding: chunked"):
        for _ in range(10):
            with connect(service) as client:
                client.sendall(head("/v1/lookup", declared))
                try:
                    if "chunked" in declared:
                        for _ in range(BODY_BYTES >> 16):
                            client.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                    else:
                        client.sendall(bytes(BODY_BYTES))
                    answer = client.recv(1 << 16)
                except ConnectionError:
                    continue  # the server has hung up while we were still sending: refused, too
                assert status_of(answer) == (411 if "chunked" in declared else 413)
    check_alive(service)
    assert resident_bytes() - before < ALLOWED_GROWTH


def test_floods_of_headers_are_cut_off(service: AdminSockets) -> None:
    """Long before they end, also where uvicorn would rather use httptools, which has no limit."""
    import_module("httptools")
    check_alive(service)
    before = resident_bytes()
    for _ in range(5):
        with connect(service) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: kvstow\r\n")
            with pytest.raises(ConnectionError):
                client.sendall(b"X-Flood: 0123456789\r\n" * (HEADER_BYTES // 20))
    check_alive(service)
    assert resident_bytes() - before < ALLOWED_GROWTH


def test_a_slow_body_times_out_while_others_are_served(
    serve: Any, ranks: Any, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry = BodyMiddleware.__init__

    def in_a_hurry(self: BodyMiddleware, app: FastAPI) -> None:
        hurry(self, app, seconds=0.2)

    monkeypatch.setattr(BodyMiddleware, "__init__", in_a_hurry)
    service: AdminSockets = serve(token_file=token_file)
    with connect(service) as slow:
        slow.sendall(head("/v1/lookup", "Content-Length: 100") + b'{"slo')
        check_alive(service)
        answer = read_to_end(slow)
    assert status_of(answer) == 408
    assert b'"code": "body_too_slow"' in answer
    assert b"connection: close" in answer.lower()


def test_a_client_that_never_reads_does_not_block_others(service: AdminSockets, ranks: Any, keys: list[bytes]) -> None:
    before = resident_bytes()
    with connect(service) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(f"GET /v1/events?types=stored,removed HTTP/1.1\r\nHost: kvstow\r\n{_TOKEN}\r\n\r\n".encode())
        assert status_of(deaf.recv(64)) == 200
        for _ in range(3000):
            ranks.store(keys[:8])
            ranks.engine.admin.purge(everything=True).run()
        check_alive(service)
        assert resident_bytes() - before < ALLOWED_GROWTH
