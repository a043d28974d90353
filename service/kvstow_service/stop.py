"""Why and when the process stops: signals, and whatever else asks for it."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple


class Stop(NamedTuple):
    """A reason for people, and the exit status it leads to."""

    reason: str
    status: int


class StopRequests:
    """The first request counts. SIGTERM and SIGINT are requests with status 0; a second signal ends the process
    at once, with 128 + its number.

    `request` is safe on any thread; `install` and `wait` belong to the main thread.
    """

    def __init__(self) -> None:
        # Of all queues and events only this one may be touched by a signal handler that interrupts its own wait.
        self._requests: SimpleQueue[Stop] = SimpleQueue()
        self._signalled = False

    def install(self) -> None:
        """Take SIGTERM and SIGINT over."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def request(self, reason: str, status: int) -> None:
        self._requests.put(Stop(reason, status))

    def wait(self) -> Stop:
        return self._requests.get()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
        self.request(signal.Signals(number).name, 0)
