"""The admin server: uvicorn on a thread of its own, and what it lacks against clients that would cost too much.

The protocol is uvicorn's h11 even if httptools is installed. httptools does not limit heads, and creates an object for
each of the thousands of pipelined requests that one read may contain. A request costs 50 us more with h11; rendering
the metrics costs twenty times as much.
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
_request_logger.setLevel(logging.ERROR)  # uvicorn logs a warning for each malformed request

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")

_READ_BYTES = 4 << 10  # parsed in one iteration of the event loop, at 2 us a byte for the smallest chunks
_MAX_UNREAD_BYTES = 64 << 10  # of a body that arrives after a response that did not need it
_MAX_CONNECTIONS, _MIN_CONNECTIONS = 256, 16
_SHARE_OF_DESCRIPTORS = 8  # the engine keeps the other seven eighths
_IDLE_SECONDS = 1.0  # a younger connection may not have had time to send its request
_ACCEPTS_PER_ITERATION = 16  # a connection counts two iterations of the event loop later
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_REQUESTS_PER_ITERATION = 4
_START_SECONDS = 30.0
_GRACE_SECONDS = 2  # for requests under way when the server stops


class Wait(Enum):
    """What the server waits for on a connection, and for how many seconds."""

    HEAD = 10.0  # the client must finish the TLS handshake, and send a whole request head: its first or its next
    READER = 30.0  # the client must read what has been written
    CLOSE = 5.0  # the client must read the rest before the connection closes


class Connections:
    """At most `limit` connections, each with a deadline while the server waits for its client. All methods run on the
    event loop and cost at most O(limit).

    At the limit, a new connection replaces an untrusted one from the address with the most of them: the one idle
    longest, or else the oldest. If none is untrusted, it replaces an idle trusted one; it is refused only when all
    are trusted and busy. So a probe, which is new and brief, survives a flood, especially one from another address.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.open: set[AdminProtocol] = set()
        self._clock = clock
        self._full = LimitedLog(logger, clock)

    def admit(self, new: AdminProtocol) -> bool:
        """Count a connection that was accepted; False if the caller must close it."""
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
        """Begin another wait if the server waits for something else than before. The same one is not extended."""
        wait = connection.waits_for()
        if wait is not connection.wait:
            connection.wait, connection.since = wait, self._clock()

    def make_room(self) -> bool:
        """Drop the least important connection; False if none may be dropped."""
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
        """Drop connections past their deadline. Called about once a second."""
        for one in list(self.open):
            self.look_at(one)
            if one.wait is not None and self._clock() - one.since > one.wait.value:
                self._drop(one)

    def _drop(self, connection: AdminProtocol) -> None:
        self.open.discard(connection)
        connection.drop()


def connection_limit() -> int:
    """How many connections the server may hold: few enough to leave most of the process's descriptors to the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft // _SHARE_OF_DESCRIPTORS))


class RequestQueue:
    """Lets four unauthenticated requests begin per iteration of the event loop. Not thread-safe.

    A flood brings hundreds of requests in one iteration, and a new connection needs several iterations until its
    request is read, so a probe would wait for hundreds of requests several times. Probes go first, but one of the four
    is another request if one waits: a flood of probes does not lock the operator out.
    """

    def __init__(self) -> None:
        self._probes: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    async def wait(self, *, probe: bool) -> None:
        """Returns when the request may begin."""
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        if not (self._probes or self._others):
            loop.call_soon(self._admit, loop)
        (self._probes if probe else self._others).append(admitted)
        await admitted

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in range(_REQUESTS_PER_ITERATION):
            queue = (self._others or self._probes) if number == 0 else (self._probes or self._others)
            if queue and not (admitted := queue.popleft()).done():  # done: its request was cancelled
                admitted.set_result(None)
        if self._probes or self._others:
            loop.call_soon(self._admit, loop)


class AdminProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection. It makes the TLS handshake itself, so that a connection counts from the moment it is accepted.

    The application state contains the subject of the client's certificate, and the uid at the other end of a Unix
    socket. Requests are not logged: uvicorn's option for that removes the handlers of a logger that the host's own
    server may use.
    """

    app_state: dict[str, Any]
    address = ""  # the peer's; empty for a Unix socket
    trusted = False  # it has shown a credential, or came through a Unix socket, which only admins can open
    wait: Wait | None = Wait.HEAD  # when `Connections` last looked
    opened = since = 0.0  # when it was accepted, and when the server began to wait, on the clock of `Connections`

    def __init__(self, admitted: Connections, queue: RequestQueue, tls: ServerTls | None, **options: Any) -> None:
        super().__init__(**options)
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._app, self.app = self.app, self._run_in_turn
        self._admitted, self._queue, self._tls = admitted, queue, tls
        self._received = memoryview(b"")
        self._early = b""  # what has arrived right behind a TLS handshake, before `_begin`
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
        if transport is None or self not in self._admitted.open:  # the client has left, or does not speak TLS
            self.drop()
            self.connection_lost(None)
            return
        self._begin(transport)
        if self._early:
            self.data_received(self._early)

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert")
        # TLS 1.2 may resume a session, and then does not check whether the authority is still trusted.
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
        """Close handshakes, and streams, which would never end. Other responses that were written are still sent."""
        if self.flow is None:
            self.drop()
            return
        super().shutdown()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        self._received = memoryview(bytearray(_READ_BYTES))  # a view: asyncio's TLS fills slices of what it is given
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
            self.cycle.keep_alive = False  # otherwise a probe would wait for all that others have pipelined
        self._admitted.look_at(self)

    def handle_events(self) -> None:
        """Refuse a head with too many lines before h11 parses it, which takes 10 ms for the 3,000 headers that 16 KiB
        can hold. Bodies have no trailers: `AdmissionMiddleware` refuses the encoding that has them."""
        if self.conn.their_state is h11.IDLE:
            head = _END_OF_HEAD.split(self.conn.trailing_data[0].lstrip(b"\r\n"), 1)[0]
            if head.count(b"\n") > MAX_HEADERS:  # the first line has the method, and the last one no end here
                self._refuse(431, f"the request head has too many lines; allowed: {MAX_HEADERS} headers")
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        self.trusted = self.trusted or is_known(self.scope.get(ACTOR))
        self._unread_bytes = 0
        super().on_response_complete()

    def waits_for(self) -> Wait | None:
        """What the server waits for now; None while it handles a request."""
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
        if not cycle.disconnected:  # otherwise no client would read the response
            await self._app(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed input with a problem. Called while h11's error is being handled."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            self._refuse(431, f"the request head is too large; allowed: {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(status, f"not HTTP/1.1: {sys.exception()}", code="malformed_request")

    def _refuse(self, status: int, detail: str, code: str | None = None) -> None:
        """Answer a request that did not reach the application, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:  # otherwise half a response has been sent
            answer = problem({}, status, detail, code=code, headers={"Connection": "close"})
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
            lines += [b"%s: %s" % header for header in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()


class AdminServer(uvicorn.Server):
    """Serves an ASGI app on sockets that are already bound.

    Guarantees: `start` returns when the server answers requests. `stop` is idempotent, ends the thread and closes the
    sockets. The process's signal handlers, loggers and event loop policy are left alone. `on_failure` is called on the
    server's thread if the server ends without `stop`. With `tls`, TCP sockets use it; Unix sockets never do. Clients
    can use only a bounded amount of memory, time, descriptors and log lines.
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
        """`log` writes what the server's thread logs; None in a process whose log blocks no thread (`QueuedLog`)."""
        self.admitted = Connections(connection_limit(), clock)
        protocol: Any = partial(AdminProtocol, self.admitted, RequestQueue(), tls)
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",  # uvicorn before 0.36 makes uvloop, if installed, the policy of the whole process
            log_config=None,
            server_header=False,
            proxy_headers=False,  # by default a client on loopback could claim another client's address
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
        """Raises `ConflictError` if the server does not start."""
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
        except (Exception, SystemExit) as error:  # uvicorn ends a failed start with SystemExit
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
            listener.listen(_BACKLOG)  # asyncio has one number for this and for what it accepts at once
        self._answering.set()

    async def main_loop(self) -> None:
        try:
            await super().main_loop()
        except Exception:
            await self.shutdown()  # otherwise clients would wait for responses that never come
            raise

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log exceptions that reach the event loop, once a minute: a client may be able to cause one repeatedly."""
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context:  # from accept: no descriptor or no memory is left
            self._unaccepted.warning("the admin server cannot accept a connection: %s", error.strerror)
            self.admitted.make_room()
        elif not self.should_exit:  # asyncio accepts again a second later, even from a socket that is closed by then
            self._errors.log(logging.ERROR, "%s", context["message"], exc_info=error)
