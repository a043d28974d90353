"""Periodic work of a host: one thread ticks it, another renews TLS files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("kvstow.ticker")

_OVERDUE_SECONDS = 10.0
_JOIN_SECONDS = 1.0


class Ticked(Protocol):
    """An engine, or a node of many."""

    def tick(self) -> object: ...


class Ticker:
    """Ticks the host every `interval` seconds until `stop`, which is idempotent. No exception ends the thread.

    `renew_tls` is called as often, on a separate thread: it reads files, and a file system may block.
    """

    def __init__(
        self,
        host: Ticked,
        *,
        interval: float = 1.0,
        renew_tls: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopping = threading.Event()
        self._threads = [_Repeating("the ticker", host.tick, interval, self._stopping, clock)]
        if renew_tls is not None:
            self._threads.append(_Repeating("the check of the TLS files", renew_tls, interval, self._stopping, clock))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> str | None:
        """Health check: which periodic work has stopped."""
        return next(filter(None, (thread.failure() for thread in self._threads)), None)


class _Repeating:
    """A thread that repeats a call, whatever it raises, and knows when the call last returned."""

    def __init__(
        self,
        name: str,
        act: Callable[[], object],
        interval: float,
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._act, self._interval = name, act, interval
        self._stopping = stopping
        self._clock = clock
        self._last = clock()
        self._thread = threading.Thread(target=self._run, name="kvstow-ticker", daemon=True)

    def start(self) -> None:
        self._last = self._clock()
        self._thread.start()

    def join(self) -> None:
        """Waits for a second at most; the thread is a daemon."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def failure(self) -> str | None:
        """How the work has stopped, or None."""
        if not self._thread.is_alive():
            return f"{self._name} has stopped"
        age = self._clock() - self._last
        return f"{self._name} has not run for {age:.0f} s" if age > _OVERDUE_SECONDS + self._interval else None

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._act()
            except Exception:
                logger.exception("%s failed", self._name)
            self._last = self._clock()
