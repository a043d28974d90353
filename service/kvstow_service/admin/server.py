"""The admin server: uvicorn on a thread of its own, with protections that it lacks against expensive clients.

It always uses uvicorn's h11 protocol, even if httptools is installed. httptools does not limit heads, and creates an
object for each of the thousands of pipelined requests that one read may contain. With h11 a request costs 50 us more,
while rendering the metrics costs twenty times as much.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from http import HTTPStatus
from socket import AF_UNIX, socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstow.attach.peer import credentials_of
from kvstow.errors import ConflictError
from kvstow_api.auth import ACTOR, CALLER, CERTIFICATE, is_known, is_probe
from kvstow_api.journal import LimitedLog
from kvstow_api.problems import problem
from kvstow_service.admin.tls import ServerTls, subject_of
from kvstow_service.process.logwriter import LogWriter

logger = logging.getLogger("kvstow.server")
_request_logger = logging.getLogger("kvstow.server.requests")
_request_logger.setLevel(logging.ERROR)  # because uvicorn logs a warning for each malformed request

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")

_READ_BYTES = 4 << 10  # bytes parsed in one iteration of the event loop; the smallest chunks take 2 us a byte
_MAX_UNREAD_BYTES = 64 << 10  # the limit for the rest of a body that arrives after a response that did not need it
_MAX_CONNECTIONS, _MIN_CONNECTIONS = 256, 16
_SHARE_OF_DESCRIPTORS = 8  # the server may use one in eight of the process's descriptors
_IDLE_SECONDS = 1.0  # a connection is idle after this time; before, it may not have had time to send its request
_ACCEPTS_PER_ITERATION = 16  # few, because a connection is counted only two iterations of the event loop later
_BACKLOG = 1024  # how many connections the kernel keeps until they are accepted
_REQUESTS_PER_ITERATION = 4
_START_SECONDS = 30.0
_GRACE_SECONDS = 2  # how long requests in progress may take after the server was stopped


class Wait(Enum):
    """What the server waits for on a connection. The value is the limit in seconds."""

    HEAD = 10.0  # the client must finish the TLS handshake, and send a whole request head: its first or its next
    READER = 30.0  # the client must read what has been written
    CLOSE = 5.0  # the client must read the rest before the connection closes


class Connections:
    """Keeps at most `limit` connections, and gives each a deadline while the server waits for its client. All methods
    run on the event loop and cost at most O(limit).

    At the limit, a new connection replaces an untrusted one from the address that has the most of them: the one that
    has been idle longest, or else the oldest. If none is untrusted, it replaces an idle trusted one. It is refused only
    if all are trusted and busy. So a probe, which is new and brief, survives a flood, especially one from another
    address.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.open: set[AdminProtocol] = set()
        self._clock = clock
        self._full = LimitedLog(logger, clock)

    def admit(self, new: AdminProtocol) -> bool:
        """Count an accepted connection. Returns False if the caller must close it."""
        if len(self.open) >= self.limit:
            made_room = self.make_room()
            self._full.warning(
                "the admin server has reached its limit of %d connections: %s",
                self.limit,
                "one was closed for a new one" if made_room else "a new one was refused",
            )
            if not made_room:
                return False
        new.opened = new.since = self._clock()
        self.open.add(new)
        return True

    def look_at(self, connection: AdminProtocol) -> None:
        """Begin a new wait if the server now waits for something else. A wait that continues keeps its deadline."""
        wait = connection.waits_for()
        if wait is not connection.wait:
            connection.wait, connection.since = wait, self._clock()

    def make_room(self) -> bool:
        """Drop the least important connection. Returns False if none may be dropped."""
        per_address = Counter(one.address for one in self.open if not one.trusted)
        now = self._clock()

        def rank(one: AdminProtocol) -> tuple[bool, int, bool, float]:
            idle = one.wait is not None and now - one.since >= _IDLE_SECONDS
            return one.trusted, -per_address[one.address], not idle, one.since if idle else one.opened

        victims = [one for one in self.open if not one.trusted or one.wait is not None]
        if victims:
            self._drop(min(victims, key=rank))
        return bool(victims)

    async def expire(self) -> None:
        """Drop connections that are past their deadline. Called about once a second."""
        for one in list(self.open):
            self.look_at(one)
            if one.wait is not None and self._clock() - one.since > one.wait.value:
                self._drop(one)

    def _drop(self, connection: AdminProtocol) -> None:
        self.open.discard(connection)
        connection.drop()


def connection_limit() -> int:
    """Return how many connections the server may hold, so that most descriptors of the process are left to the
    engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft // _SHARE_OF_DESCRIPTORS))


class RequestQueue:
    """Lets four unauthenticated requests begin per iteration of the event loop. Not thread-safe.

    A flood brings hundreds of requests in one iteration, and a new connection needs several iterations until its
    request is read. So a probe would have to wait for hundreds of requests several times. Therefore probes go first.
    But one of the four is another request, if one waits, so that a flood of probes does not lock out the operator.
    """

    def __init__(self) -> None:
        self._probes: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    async def wait(self, *, probe: bool) -> None:
        """Return when the request may begin."""
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        if not (self._probes or self._others):
            loop.call_soon(self._admit, loop)
        (self._probes if probe else self._others).append(admitted)
        await admitted

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in range(_REQUESTS_PER_ITERATION):
            queue = (self._others or self._probes) if number == 0 else (self._probes or self._others)
            if queue and not (admitted := queue.popleft()).done():  # it is done already if its request was cancelled
                admitted.set_result(None)
        if self._probes or self._others:
            loop.call_soon(self._admit, loop)


class AdminProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection. It makes the TLS handshake itself, so that the connection counts from the moment at which it was
    accepted.

    It adds to the application state the subject of the client's certificate, and the uid at the other end of a Unix
    socket. It does not log requests, because uvicorn's option against that removes the handlers of a logger that the
    host's own server may use.
    """

    app_state: dict[str, Any]
    address = ""  # the peer's address; empty for a Unix socket
    trusted = False  # it has shown a credential, or came through a Unix socket, which only admins can open
    wait: Wait | None = Wait.HEAD  # what the server waited for when `Connections` last looked
    opened = since = 0.0  # when it was accepted, and when the wait began, on the clock of `Connections`

    def __init__(self, admitted: Connections, queue: RequestQueue, tls: ServerTls | None, **options: Any) -> None:
        super().__init__(**options)
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._app, self.app = self.app, self._run_in_turn
        self._admitted, self._queue, self._tls = admitted, queue, tls
        self._received = memoryview(b"")
        self._early = b""  # bytes that have arrived directly after a TLS handshake, before `_begin`
        self._unread_bytes = 0
        self.access_log = False
        self.logger = _request_logger

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.drop = transport.abort
        self.trusted = transport.get_extra_info("socket").family == AF_UNIX
        self.address = "" if self.trusted else str(transport.get_extra_info("peername")[0])
        if not self._admitted.admit(self):
            self.drop()
        elif self._tls is None or self.trusted:
            self._begin(transport)
        else:
            transport.pause_reading()
            self.connections.add(self)
            securing = self.loop.create_task(self.loop.start_tls(transport, self, self._tls.context, server_side=True))
            securing.add_done_callback(self._on_secured)
            self._securing = securing

    def _on_secured(self, securing: asyncio.Task[asyncio.Transport | None]) -> None:
        transport = None if securing.cancelled() or securing.exception() is not None else securing.result()
        if transport is None or self not in self._admitted.open:  # the client has disconnected, or does not speak TLS
            self.drop()
            self.connection_lost(None)
            return
        self._begin(transport)
        if self._early:
            self.data_received(self._early)

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert")
        # If TLS 1.2 resumes a session, it does not check whether the authority is still trusted.
        if certificate and not transport.get_extra_info("ssl_object").session_reused:
            self.app_state = {**self.app_state, CERTIFICATE: subject_of(certificate)}
        if self.trusted:
            self.app_state = {**self.app_state, CALLER: credentials_of(transport.get_extra_info("socket"))[1]}

    def connection_lost(self, exc: Exception | None) -> None:
        self._admitted.open.discard(self)
        self.connections.discard(self)
        if self.flow is not None:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection during a handshake, and during a stream, which would never end. Other responses that
        were written are still sent."""
        if self.flow is None:
            self.drop()
            return
        super().shutdown()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        self._received = memoryview(bytearray(_READ_BYTES))  # a view, because asyncio's TLS fills slices of it
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._received[:nbytes])
        if self.flow is None:
            self._early += data
        else:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._unread_bytes += len(data)
            if self._unread_bytes > _MAX_UNREAD_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        if self.cycle is not None and not self.trusted and len(self._admitted.open) > self._admitted.limit // 2:
            self.cycle.keep_alive = False  # otherwise a probe would wait for all pipelined requests of others
        self._admitted.look_at(self)

    def handle_events(self) -> None:
        """Refuse a head with too many lines before h11 parses it. Parsing the 3,000 headers that fit into 16 KiB takes
        10 ms. Bodies have no trailers, because `AdmissionMiddleware` refuses the encoding that allows them."""
        if self.conn.their_state is h11.IDLE:
            head = _END_OF_HEAD.split(self.conn.trailing_data[0].lstrip(b"\r\n"), 1)[0]
            if head.count(b"\n") > MAX_HEADERS:  # the first line is the method's, and the last one has no end here
                self._refuse(431, f"the request head has too many lines; allowed: {MAX_HEADERS} headers")
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        self.trusted = self.trusted or is_known(self.scope.get(ACTOR))
        self._unread_bytes = 0
        super().on_response_complete()

    def waits_for(self) -> Wait | None:
        """Return what the server waits for now, or None while it handles a request."""
        if self.flow is None:
            return Wait.HEAD
        if self.transport.is_closing():
            return Wait.CLOSE
        if self.flow.write_paused:
            return Wait.READER
        return Wait.HEAD if self.cycle is None or self.cycle.response_complete else None

    async def _run_in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        if not self.trusted:
            await self._queue.wait(probe=is_probe(scope["path"]))
        if not cycle.disconnected:  # otherwise nothing would read the response
            await self._app(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed input with a problem document. uvicorn calls this while it handles h11's error."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            self._refuse(431, f"the request head is too large; allowed: {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(status, f"not HTTP/1.1: {sys.exception()}", code="malformed_request")

    def _refuse(self, status: int, detail: str, code: str | None = None) -> None:
        """Answer a request that did not reach the application, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:  # otherwise half a response was sent before
            answer = problem({}, status, detail, code=code, headers={"Connection": "close"})
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
            lines += [b"%s: %s" % header for header in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()


class AdminServer(uvicorn.Server):
    """Serves an ASGI app on sockets that are already bound.

    `start` returns when the server answers requests. `stop` is idempotent, ends the thread and closes the sockets. The
    process's signal handlers, loggers and event loop policy stay as they are. `on_failure` is called on the server's
    thread if the server ends without `stop`. With `tls`, TCP sockets use it. Unix sockets never do. Clients can use
    only a bounded amount of memory, time, descriptors and log lines.
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket],
        on_failure: Callable[[str], None],
        *,
        tls: ServerTls | None = None,
        log: LogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` writes the log lines of the server's thread. It is None in a process whose log never blocks a thread
        (`QueuedLog`)."""
        self.admitted = Connections(connection_limit(), clock)
        protocol: Any = partial(AdminProtocol, self.admitted, RequestQueue(), tls)
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",  # before 0.36, uvicorn would make an installed uvloop the policy of the whole process
            log_config=None,
            server_header=False,
            proxy_headers=False,  # otherwise a client on loopback could claim another client's address
            lifespan="on",
            ws="none",
            backlog=_ACCEPTS_PER_ITERATION,
            timeout_keep_alive=int(Wait.HEAD.value),
            timeout_graceful_shutdown=_GRACE_SECONDS,
            callback_notify=self.admitted.expire,
            timeout_notify=0,
        )
        super().__init__(config)
        self._sockets, self._on_failure, self._log = list(sockets), on_failure, log
        self._answering = threading.Event()
        self._unaccepted, self._errors = LimitedLog(logger), LimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name="kvstow-admin", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it serves. Raises `ConflictError` if the server does not start."""
        self._thread.start()
        if not self._answering.wait(_START_SECONDS) or not self.started:
            self.stop()
            raise ConflictError("the admin server did not start; the log says why")

    def stop(self, timeout: float = 10.0) -> None:
        self.should_exit = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        for listener in self._sockets:
            listener.close()

    def _run(self) -> None:
        reason = "it returned"
        if self._log is not None:
            self._log.start()
        try:
            self.run(self._sockets)
        except (Exception, SystemExit) as error:  # uvicorn raises SystemExit if it cannot start
            reason = repr(error)
            logger.exception("the admin server failed")
        if self._log is not None:
            self._log.stop()
        self._answering.set()
        if not self.should_exit:
            self._on_failure(f"the admin server ended: {reason}")

    async def startup(self, sockets: list[socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio uses one number for this and for how many it accepts at once
        self._answering.set()

    async def main_loop(self) -> None:
        try:
            await super().main_loop()
        except Exception:
            await self.shutdown()  # otherwise clients would wait for responses that never come
            raise

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log exceptions that reach the event loop, at most once a minute, because a client may be able to cause one
        again and again."""
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context:  # `accept` failed for lack of descriptors or memory
            self._unaccepted.warning("the admin server cannot accept a connection: %s", error.strerror)
            self.admitted.make_room()
        elif not self.should_exit:  # asyncio retries an accept after a second, even on a closed socket
            self._errors.log(logging.ERROR, "%s", context["message"], exc_info=error)
