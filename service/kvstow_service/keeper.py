"""The engine's clockwork: a thread that ticks it, and checks its books now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstow.control.engine import OffloadEngine
from kvstow.errors import IntegrityError

logger = logging.getLogger("kvstow.keeper")

_TICKS_PER_CHECK = 60
# The check holds the engine's lock while it walks the pool, 1 us a slot: larger pools do without it.
_MOST_CHECKED_SLOTS = 65_536


class Keeper:
    """Ticks once a second until `stop`, which is idempotent. No failure ends the thread.

    Once a minute, in a quiet moment, it checks the books of a pool that is not too large for that. `problem` says
    what is wrong with them, or None; it stays, for only a restart cures that. Without `checks_books` it does not:
    beside a scheduler no moment is quiet, as each of its steps takes the engine's lock.

    `chore` is done after each tick, on the same thread: it must not wait for anything.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        *,
        interval: float = 1.0,
        checks_books: bool = True,
        chore: Callable[[], None] | None = None,
    ) -> None:
        self.problem: str | None = None
        self._engine = engine
        self._checks_books = checks_books
        self._chore = chore
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstow-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> str | None:
        """The health check: `problem`, or that the clockwork stands still."""
        return self.problem or (None if self._thread.is_alive() else "the engine's clockwork has stopped")

    def _run(self) -> None:
        ticks = 0
        while not self._stopping.wait(self._interval):
            ticks += 1
            try:
                self._engine.tick()
                if ticks % _TICKS_PER_CHECK == 0 and self._may_check():
                    self._engine.check_integrity()
            except IntegrityError as error:
                self.problem = f"the engine's books do not balance: {error}"
                logger.error("%s", self.problem)
            except Exception:
                logger.exception("the engine's tick failed")
            self._do_chore()

    def _do_chore(self) -> None:
        try:
            if self._chore is not None:
                self._chore()
        except Exception:
            logger.exception("what is done beside the engine's tick failed")

    def _may_check(self) -> bool:
        if not self._checks_books:
            return False
        stats = self._engine.stats()
        idle = not (stats.pending.loads or stats.pending.stores or stats.leases)
        return idle and stats.usable_slots <= _MOST_CHECKED_SLOTS
