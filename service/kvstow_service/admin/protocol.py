"""HTTP/1.1 of the admin server: uvicorn's h11 protocol with limits.

h11 is used even if httptools is installed: it reads one request at a time and limits the size of a head. httptools does
not limit heads, and creates an object for each of the thousands of pipelined requests that one read may contain. A
request costs 50 us more with h11; rendering the metrics costs twenty times as much.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from http import HTTPStatus
from socket import AF_UNIX
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstow.attach.peer import credentials_of
from kvstow_api.auth import ACTOR, CALLER, CERTIFICATE, is_known, is_probe
from kvstow_api.problems import problem
from kvstow_service.admin.certificate import subject_of
from kvstow_service.admin.connections import Connection, Connections, Wait
from kvstow_service.admin.requestqueue import RequestQueue

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100

# The bytes of one read are parsed in one iteration of the event loop, at 2 us a byte for the smallest chunks.
_READ_BYTES, _TRUSTED_READ_BYTES = 4 << 10, 64 << 10
_MAX_UNREAD_BYTES = 64 << 10  # of a body that arrives after a response that did not need it

_END_OF_HEAD = re.compile(rb"\n\r?\n")

_logger = logging.getLogger("kvstow.server.requests")
_logger.setLevel(logging.ERROR)  # uvicorn logs a warning for each malformed request, and any client can send a million


class AdminProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection. It sets what the server waits for on its `Connection`, which has the deadlines.

    The application state contains the subject of the client's certificate, and the uid at the other end of a Unix
    socket. Requests are not logged: uvicorn's option
    for that removes the handlers of a logger that the host's own server may use.
    """

    app_state: dict[str, Any]

    def __init__(self, connection: Connection, connections: Connections, queue: RequestQueue, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _BoundedHeads(h11.SERVER, MAX_HEAD_BYTES)
        self._app, self.app = self.app, self._run_in_turn
        self._connection = connection
        self._connections = connections
        self._queue = queue
        self._received = memoryview(b"")
        self._unread_bytes = 0
        self.access_log = False
        self.logger = _logger

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.drop = transport.abort
        certificate = transport.get_extra_info("peercert")
        # TLS 1.2 may resume a session, and then does not check whether the authority is still trusted.
        if certificate and not transport.get_extra_info("ssl_object").session_reused:
            self.app_state = {**self.app_state, CERTIFICATE: subject_of(certificate)}
        connected = transport.get_extra_info("socket")
        if connected.family == AF_UNIX:
            self.app_state = {**self.app_state, CALLER: credentials_of(connected)[1]}
        self._update_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.closed()

    def get_buffer(self, sizehint: int) -> memoryview:
        size = _TRUSTED_READ_BYTES if self._connection.trusted else _READ_BYTES
        self._received = memoryview(bytearray(size))  # a view: asyncio's TLS fills slices of what it is given
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._received[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._unread_bytes += len(data)
            if self._unread_bytes > _MAX_UNREAD_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        if self.cycle is not None and not self._connection.trusted and self._connections.crowded:
            self.cycle.keep_alive = False
        self._update_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_wait()

    def on_response_complete(self) -> None:
        if is_known(self.scope.get(ACTOR)):
            self._connection.trusted = True
        self._unread_bytes = 0
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's own deadline, which the first byte of a request lifts
        self._update_wait()

    def shutdown(self) -> None:
        """Close streams, which would never end. Other responses that were written are still sent."""
        super().shutdown()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed input. Called while h11's error is being handled."""
        if self.cycle is None or self.cycle.response_complete:  # otherwise half a response has been sent
            error = sys.exception()
            self.transport.write(_refusal(getattr(error, "error_status_hint", 400), str(error)))
        self.transport.close()

    async def _run_in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        if not self._connection.trusted:
            await self._queue.wait(probe=is_probe(scope["path"]))
        if not cycle.disconnected:  # otherwise no client would read the response
            await self._app(scope, receive, send)

    def _update_wait(self) -> None:
        if self.transport.is_closing():
            self._connection.wait_for(Wait.CLOSE)
        elif self.flow.write_paused:
            self._connection.wait_for(Wait.READER)
        elif self.cycle is None or self.cycle.response_complete:
            self._connection.wait_for(Wait.HEAD)
        else:
            self._connection.wait_for(None)


class _BoundedHeads(h11.Connection):
    """Refuses a head with too many headers before it is parsed: h11 needs 10 ms for the 3,000 that 16 KiB can hold."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            received, _ = self.trailing_data
            head = _END_OF_HEAD.split(received, maxsplit=1)[0]
            if head.rstrip(b"\r\n").count(b"\n") > MAX_HEADERS:  # the first line has the method
                raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
        return super().next_event()


def _refusal(status: int, reason: str) -> bytes:
    """A complete response to malformed input."""
    allowed = f"the request head is too large; allowed: {MAX_HEAD_BYTES} bytes with {MAX_HEADERS} headers"
    detail = allowed if status == 431 else f"not HTTP/1.1: {reason}"
    answer = problem({}, status, detail, code=None if status == 431 else "malformed_request")
    answer.headers["Connection"] = "close"
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + bytes(answer.body)
