"""Slow clients and clients that never read cost bounded memory, and probes keep answering."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvstow_api.middleware import BodyMiddleware
from kvstow_service.admin.sockets import AdminSockets

ALLOWED_GROWTH = 64 << 20
_SOCKET_SECONDS = 60.0
_TOKEN = "Authorization: Bearer admin-token"


@pytest.fixture
def service(serve: Any, ranks: Any, token_file: Path) -> AdminSockets:
    listeners: AdminSockets = serve(startup_grace=0.0, token_file=token_file)
    return listeners


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
