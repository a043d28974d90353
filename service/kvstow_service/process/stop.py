"""Requests to stop the process: signals and failures."""

from __future__ import annotations

import os
import signal
import socket
import threading
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import NamedTuple, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop(NamedTuple):
    """A reason for the log, and the exit status."""

    reason: str
    status: int


class StopRequests:
    """A context manager, for the main thread, that turns SIGTERM and SIGINT into requests with status 0.

    The first request counts. A second signal ends the process at once, with status 128 + its number.

    No signal is lost or delayed while the main thread waits. A Python handler cannot guarantee that: a signal that
    arrives just before the main thread blocks on a lock is handled only after that wait. So the C handler writes the
    signal's number to a socket, which a separate thread reads.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        """Set by the first request, but never in a signal handler, which could interrupt a holder of the lock."""
        self._requests: SimpleQueue[Stop] = SimpleQueue()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # required by set_wakeup_fd
        self._thread = threading.Thread(target=self._watch, name="kvstow-signals", daemon=True)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _leave_to_watcher) for number in _SIGNALS}
        self._wakeup_fd = signal.set_wakeup_fd(self._sender.fileno())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def request(self, reason: str, status: int) -> None:
        """Ask the process to stop. Thread-safe."""
        self._requests.put(Stop(reason, status))
        self.requested.set()

    def wait(self) -> Stop:
        """Wait for the first request."""
        return self._requests.get()

    def _watch(self) -> None:
        signalled = False
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number not in _SIGNALS:
                    continue
                if signalled:
                    os._exit(128 + number)
                signalled = True
                self.request(signal.Signals(number).name, 0)


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Python writes a signal's number to the socket only if it has a Python handler."""
