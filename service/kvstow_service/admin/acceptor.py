"""Accepts the admin server's connections, never more than its limit."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from socket import AF_UNIX, socket

from kvstow_api.limitedlog import LimitedLog
from kvstow_service.admin.connections import Connection, Connections, Wait

logger = logging.getLogger("kvstow.server")

# Per iteration of the event loop, and never more than the limit: connections dropped to make room close in the next
# iteration. Accepting is quick, so a probe does not wait behind a flood in the kernel's queue.
_ACCEPTS_PER_ITERATION = 64
_PAUSE_SECONDS = 1.0

MakeProtocol = Callable[[Connection], asyncio.BaseProtocol]


class Acceptor:
    """Accepts connections in place of asyncio's servers, which accept thousands before the first can be counted, and
    log a traceback for each that they cannot accept.

    A connection counts from `accept` on, including a stalled TLS handshake. All methods run on the event loop.
    """

    def __init__(
        self,
        listeners: Sequence[socket],
        connections: Connections,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listeners = listeners
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._failures = LimitedLog(logger)

    def start(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Stop accepting, and drop connections whose handshake has not finished. Idempotent."""
        self._pause()
        for task in self._opening:
            task.cancel()

    def _pause(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _accept(self, listener: socket) -> None:
        for _ in range(min(_ACCEPTS_PER_ITERATION, self._connections.limit)):
            try:
                accepted, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left: trying again at once would fail too
                self._failures.warning("the admin server cannot accept a connection: %s", error.strerror)
                self._connections.make_room()
                self._pause()
                self._resuming = self._loop.call_later(_PAUSE_SECONDS, self.start)
                return
            self._open(accepted, peer)

    def _open(self, accepted: socket, peer: object) -> None:
        is_unix = accepted.family == AF_UNIX
        tls = None if is_unix else self._tls
        client = str(peer[0]) if isinstance(peer, tuple) else ""
        connection = self._connections.admit(client, trusted=is_unix, wait=Wait.HEAD if tls is None else Wait.HANDSHAKE)
        if connection is None:
            accepted.close()
            return
        accepted.setblocking(False)
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(
                partial(self._make_protocol, connection),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else Wait.HANDSHAKE.seconds,
            )
        )
        connection.drop = task.cancel  # until its protocol has a transport
        self._opening.add(task)
        task.add_done_callback(partial(self._on_opened, accepted, connection))

    def _on_opened(self, accepted: socket, connection: Connection, task: asyncio.Task[object]) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:  # the client has left, or does not speak TLS
            accepted.close()
            connection.closed()
