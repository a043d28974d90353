"""The engine's periodic work: one thread ticks the engine and checks its integrity, another checks files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstow.control.engine import OffloadEngine
from kvstow.errors import IntegrityError

logger = logging.getLogger("kvstow.ticker")

_TICKS_PER_CHECK = 60
_STILL_SECONDS = 10.0
_JOIN_SECONDS = 1.0
# The check holds the engine's lock while it walks the pool, 1 us a slot: larger pools do without it.
_MOST_CHECKED_SLOTS = 65_536


class Ticker:
    """Ticks once a second until `stop`, which is idempotent. No failure ends the thread.

    Once a minute, in a quiet moment, it checks the books of a pool that is not too large for that. `problem` says
    what is wrong with them, or None; it stays, for only a restart cures that. Without `checks_books` it does not:
    beside a scheduler no moment is quiet, as each of its steps takes the engine's lock.

    `chore` is done as often, on a thread of its own: it may read files, and a file system may take any time.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        *,
        interval: float = 1.0,
        checks_books: bool = True,
        chore: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem: str | None = None
        self._engine = engine
        self._checks_books = checks_books
        self._ticks = 0
        self._stopping = threading.Event()
        self._beats = [_Beat("the engine's ticker", self._tick, interval, self._stopping, clock)]
        if chore is not None:
            self._beats.append(_Beat("the check of the TLS files", chore, interval, self._stopping, clock))

    def start(self) -> None:
        for beat in self._beats:
            beat.start()

    def stop(self) -> None:
        self._stopping.set()
        for beat in self._beats:
            beat.join()

    def check(self) -> str | None:
        """The health check: `problem`, or which periodic work has stopped."""
        return self.problem or next(filter(None, (beat.failure() for beat in self._beats)), None)

    def _tick(self) -> None:
        self._ticks += 1
        try:
            self._engine.tick()
            if self._ticks % _TICKS_PER_CHECK == 0 and self._may_check():
                self._engine.check_integrity()
        except IntegrityError as error:
            self.problem = f"the engine's books do not balance: {error}"
            logger.error("%s", self.problem)

    def _may_check(self) -> bool:
        if not self._checks_books:
            return False
        stats = self._engine.stats()
        idle = not (stats.pending.loads or stats.pending.stores or stats.leases)
        return idle and stats.usable_slots <= _MOST_CHECKED_SLOTS


class _Beat:
    """Repeats one piece of work on a thread of its own, whatever it raises, and knows when it last ran."""

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
        """Abandons work that hangs for more than a second: the thread is a daemon."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def failure(self) -> str | None:
        """Says that the work has stopped; None while it has not."""
        if not self._thread.is_alive():
            return f"{self._name} has stopped"
        silent = self._clock() - self._last
        return f"{self._name} has not run for {silent:.0f} s" if silent > _STILL_SECONDS + self._interval else None

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._act()
            except Exception:
                logger.exception("%s failed", self._name)
            self._last = self._clock()
