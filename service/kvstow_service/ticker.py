"""Periodic work of a host: one thread ticks the engine and checks its integrity, another renews TLS files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstow.control.engine import OffloadEngine
from kvstow.errors import IntegrityError

logger = logging.getLogger("kvstow.ticker")

_TICKS_PER_CHECK = 60
_OVERDUE_SECONDS = 10.0
_JOIN_SECONDS = 1.0
# The check holds the engine's lock for 1 us per slot, so larger pools are not checked.
_MAX_CHECKED_SLOTS = 65_536


class Ticker:
    """Ticks the engine every `interval` seconds until `stop`, which is idempotent. No exception ends the thread.

    With `checks_integrity`, it runs `check_integrity` once a minute if the engine is idle and the pool is not too
    large. `problem` says what the check found and stays set, because only a restart repairs it. Hosts with a scheduler
    turn the check off: their steps take the engine's lock all the time.

    `renew_tls` is called as often, on a separate thread: it reads files, and a file system may block.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        *,
        interval: float = 1.0,
        checks_integrity: bool = True,
        renew_tls: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem: str | None = None
        self._engine = engine
        self._checks_integrity = checks_integrity
        self._ticks = 0
        self._stopping = threading.Event()
        self._threads = [_Repeating("the engine's ticker", self._tick, interval, self._stopping, clock)]
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
        """Health check: `problem`, or which periodic work has stopped."""
        return self.problem or next(filter(None, (thread.failure() for thread in self._threads)), None)

    def _tick(self) -> None:
        self._ticks += 1
        try:
            self._engine.tick()
            if self._ticks % _TICKS_PER_CHECK == 0 and self._may_check():
                self._engine.check_integrity()
        except IntegrityError as error:
            self.problem = f"the integrity check failed: {error}"
            logger.error("%s", self.problem)

    def _may_check(self) -> bool:
        if not self._checks_integrity:
            return False
        stats = self._engine.stats()
        idle = not (stats.transfers.pending.loads or stats.transfers.pending.stores or stats.pool.leases)
        return idle and stats.pool.usable_slots <= _MAX_CHECKED_SLOTS


class _Repeating:
    """A thread that repeats a call, whatever it raises, and knows when the call last returned."""

    def __init__(
        self, name: str, act: Callable[[], None], interval: float, stopping: threading.Event, clock: Callable[[], float]
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
