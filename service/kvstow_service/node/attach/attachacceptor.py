"""Accepts the connections of engines, never more than the limit."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from kvstow_service.node.attach.attachtally import AttachTally
from kvstow_service.node.attach.clientcalls import ClientCalls
from kvstow_service.node.attach.clients import Clients

_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 1.0


class AttachAcceptor:
    """Accepts for the attach server's thread, the only thread that uses it. At the limit, a connection that has not
    said hello makes room for a new one, the oldest first. If all have said hello, the new connection is refused."""

    def __init__(
        self,
        epoll: select.epoll,
        listener: socket.socket,
        clients: Clients,
        calls: ClientCalls,
        tally: AttachTally,
        scratch: bytearray,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoll = epoll
        self._listener = listener
        self._clients = clients
        self._calls = calls
        self._tally = tally
        self._scratch = scratch
        self._clock = clock
        self.paused_until: float | None = None
        """Set while the process has no descriptor left."""

    def start(self) -> None:
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def is_listener(self, fd: int) -> bool:
        return fd == self._listener.fileno()

    def resume(self) -> bool:
        """Listen again if the pause is over. Returns whether it was."""
        if self.paused_until is None or self._clock() < self.paused_until:
            return False
        self.paused_until = None
        self._epoll.register(self._listener, select.EPOLLIN)
        return True

    def accept(self) -> None:
        """Accept some of the waiting connections."""
        for _ in range(min(_ACCEPTS_PER_TURN, self._clients.limit)):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left: trying again at once would fail too
                self._pause(error)
                return
            self._tally.accepted += 1
            try:
                self._admit(accepted)
            except Exception as error:  # noqa: BLE001 - logged and counted
                self._tally.fault(error)
                accepted.close()

    def _pause(self, error: OSError) -> None:
        self._tally.refuse("no_descriptors", f"it cannot be accepted: {error.strerror}")
        oldest = self._clients.oldest_stranger()
        if oldest is not None:
            self._calls.drop(oldest, "no_descriptors", "the service has no descriptor left")
        self._epoll.unregister(self._listener)
        self.paused_until = self._clock() + _PAUSE_SECONDS

    def _admit(self, accepted: socket.socket) -> None:
        oldest = self._clients.oldest_stranger()
        if oldest is not None and self._clients.is_crowded:
            self._calls.drop(oldest, "too_many_strangers", "too many connections have not said hello")
        client = self._clients.add(accepted, self._scratch)
        self._calls.watch(client)
        if self._clients.is_over_limit:
            reason = f"the service serves {self._clients.limit} connections already"
            self._calls.drop(client, "too_many_clients", reason)
        else:
            self._calls.on_event(client, select.EPOLLIN)  # a hello that has arrived protects it from a flood
