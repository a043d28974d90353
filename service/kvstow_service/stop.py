"""Why and when the process stops: signals, and whatever else asks for it."""

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
    """A reason for people, and the exit status it leads to."""

    reason: str
    status: int


class StopRequests:
    """Takes SIGTERM and SIGINT over while it is entered, on the main thread. The first request counts; a signal is
    one with status 0. A second signal ends the process at once, with 128 + its number.

    Guarantees: no signal is lost or late, whatever the main thread waits for. A Python handler alone does not give
    that: a signal that arrives just before the main thread starts to wait for a lock is handled after that wait.
    So the C handler writes the signal's number to a socket, and a thread of our own reads it.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        """Set with the first request; never by a signal handler, which might hold the event's own lock."""
        self._requests: SimpleQueue[Stop] = SimpleQueue()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # what set_wakeup_fd asks for
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
        """Safe on any thread."""
        self._requests.put(Stop(reason, status))
        self.requested.set()

    def wait(self) -> Stop:
        """The first request."""
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
    """A signal needs a handler of Python's for its number to be written to the socket."""
