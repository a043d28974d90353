from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from tests.waiting import eventually

from kvstow.errors import ConflictError
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


def test_the_processs_signal_handlers_are_kept(serving: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    server, _ = serving(APP)
    assert signal.getsignal(signal.SIGTERM) is before
    server.stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_access_log_of_another_server_in_the_process_is_left_alone(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    access = logging.getLogger("uvicorn.access")
    handler = logging.NullHandler()
    access.addHandler(handler)
    caplog.set_level(logging.INFO)
    try:
        _, listeners = serving(APP)
        assert httpx.get(listeners.url).text == "hello"
        assert (access.handlers, access.propagate) == ([handler], True)
    finally:
        access.removeHandler(handler)
    assert [record for record in caplog.records if record.name == "uvicorn.access"] == []


def test_a_server_that_dies_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its idle clients would find out only when they wait for an answer."""
    dying = threading.Event()

    async def tick(self: uvicorn.Server, counter: int) -> bool:
        if dying.is_set():
            raise RuntimeError("the loop broke")
        return self.should_exit

    monkeypatch.setattr(uvicorn.Server, "on_tick", tick)
    listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
    reasons: SimpleQueue[str] = SimpleQueue()
    server = AdminServer(APP, listeners.sockets, reasons.put)
    server.start()
    with socket.create_connection(("127.0.0.1", listeners.port), timeout=30.0) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: kvstow\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
        dying.set()
        while client.recv(4096):
            pass
    assert "the loop broke" in reasons.get(timeout=60)
    server.stop()


def test_stop_ends_the_thread_and_frees_the_port(serving: Any) -> None:
    server, listeners = serving(APP)
    server.stop()
    server.stop()
    assert "kvstow-admin" not in {thread.name for thread in threading.enumerate()}
    serving(APP, port=listeners.port)


def test_the_date_header_is_updated(serving: Any) -> None:
    _, listeners = serving(APP)
    first = httpx.get(listeners.url).headers["date"]
    eventually(lambda: httpx.get(listeners.url).headers["date"] != first)


def test_an_idle_connection_does_not_delay_the_stop(serving: Any) -> None:
    server, listeners = serving(APP)
    with httpx.Client(base_url=listeners.url) as client:
        assert client.get("/").text == "hello"
        server.stop()
    assert "kvstow-admin" not in {thread.name for thread in threading.enumerate()}


def test_a_stream_ends_with_the_server_and_is_no_error(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield b"first\n"
        await asyncio.Event().wait()

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(forever())

    server, listeners = serving(Starlette(routes=[Route("/", stream)]))
    with httpx.stream("GET", listeners.url, timeout=60.0) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "first"
        server.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            next(lines)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_an_app_that_does_not_start_is_an_error() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
    reasons: SimpleQueue[str] = SimpleQueue()
    with pytest.raises(ConflictError, match="the admin server did not start"):
        AdminServer(broken, listeners.sockets, reasons.put).start()
    assert "SystemExit" in reasons.get(timeout=60)


def test_the_sockets_are_closed_even_if_it_never_started() -> None:
    listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
    AdminServer(APP, listeners.sockets, pytest.fail).stop()
    with pytest.raises(OSError, match=r"refused|Bad file"), socket.create_connection(("127.0.0.1", listeners.port)):
        pass
