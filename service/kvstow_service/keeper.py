"""The engine's clockwork: a thread that ticks it, and checks its books now and then."""

from __future__ import annotations

import logging
import threading

from kvstow.control.engine import OffloadEngine
from kvstow.errors import IntegrityError

_log = logging.getLogger("kvstow.keeper")

_TICKS_PER_CHECK = 60
# The check holds the engine's lock for as long as it walks the pool; above this size it waits for an idle moment.
_SMALL_POOL_SLOTS = 16_384


class Keeper:
    """Ticks once a second until `stop`, which is idempotent. No failure ends the thread.

    `problem` says what is wrong with the engine's books, or None; it stays, for only a restart cures that.
    """

    def __init__(self, engine: OffloadEngine, *, interval: float = 1.0) -> None:
        self.problem: str | None = None
        self._engine = engine
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstow-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        ticks = 0
        while not self._stopping.wait(self._interval):
            ticks += 1
            try:
                self._engine.tick()
                if ticks % _TICKS_PER_CHECK == 0 and self._may_check():
                    self._engine.check_integrity()
            except IntegrityError as error:
                if self.problem is None:
                    _log.error("the engine's books do not balance: %s", error)
                self.problem = str(error)
            except Exception:  # noqa: BLE001 - logged; the next tick comes
                _log.exception("the engine's tick failed")

    def _may_check(self) -> bool:
        stats = self._engine.stats()
        idle = not (stats.pending.loads or stats.pending.stores or stats.leases)
        return idle or stats.usable_slots <= _SMALL_POOL_SLOTS
