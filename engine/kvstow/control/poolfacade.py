"""What a host, its admin API and its metrics ask of a pool, with any kind of session."""

from __future__ import annotations

from kvstow.config import EngineConfig
from kvstow.control import snapshots
from kvstow.control.administration import Administrator
from kvstow.control.blockevents import BlockEventLog
from kvstow.control.pool import Pool
from kvstow.messages import DesiredState
from kvstow.stats import EngineStats
from kvstow.status import BlockPage, BlockStatus, Readiness, TransferStatus


class PoolFacade:
    """Snapshots and administration of one pool. Every call is safe from any thread.

    `engine_id` names this life of the pool. `check_integrity` holds the lock for O(pool), snapshots for O(1) or as they
    say.
    """

    config: EngineConfig
    engine_id: str
    admin: Administrator

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.config = pool.config
        self.engine_id = pool.desired.engine_id
        self.admin = Administrator(pool)

    @property
    def events(self) -> BlockEventLog:
        return self._pool.events

    @property
    def used_slots(self) -> int:
        """Slots that hold a block, or will. O(1), without the lock."""
        return self._pool.used_slots

    def desired(self) -> DesiredState:
        """The desired state of every rank."""
        with self._pool.lock:
            return self._pool.desired

    @property
    def integrity_error(self) -> str | None:
        """What the last integrity check found."""
        with self._pool.lock:
            return self._pool.integrity_error

    def tick(self) -> None:
        """See `Pool.tick`."""
        self._pool.tick()

    def check_integrity(self) -> None:
        """See `Pool.check_integrity`."""
        self._pool.check_integrity()

    def count_error(self, code: str) -> None:
        """Count an error of the host; `code` is one of `kvstow.stats.ERRORS`."""
        with self._pool.lock:
            self._pool.counters.faults.errors[code] += 1

    # -- snapshots ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """One consistent copy of all counters. O(1)."""
        return snapshots.stats(self._pool)

    def readiness(self) -> Readiness:
        """Whether traffic can flow, the reason if not, and the status of each rank. O(ranks)."""
        return snapshots.readiness(self._pool)

    def transfers(self, limit: int = 1000) -> list[TransferStatus]:
        """Ops in flight, oldest first."""
        return snapshots.transfers(self._pool, limit)

    def block(self, key: bytes) -> BlockStatus | None:
        """The visible block under `key`."""
        return snapshots.block(self._pool, key)

    def blocks(self, start_slot: int = 0, limit: int = 100) -> BlockPage:
        """Visible blocks in order of their slots, from `start_slot` on. Visits 1,024 slots at most: a page may be short
        or empty and still have a `next_slot`."""
        return snapshots.blocks(self._pool, start_slot, limit)
