"""The control plane's facade, for a host that embeds the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstow.config import EngineConfig
from kvstow.control import snapshots
from kvstow.control.administration import Administrator
from kvstow.control.blockevents import BlockEventLog
from kvstow.control.pool import Pool
from kvstow.control.session import Session
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.stats import EngineStats
from kvstow.status import BlockPage, BlockStatus, Readiness, TransferStatus


class OffloadEngine(Session):
    """A pool with one session, in the same process. The pool's memory is that of the session's ranks, and is lost when
    one of them restarts.

    Decides which block is in which slot, and tracks every copy until all ranks have finished it. Guarantees: a key is
    visible only once every rank holds its bytes. A slot is reused only when no rank may still read or write it. Op ids
    are never reused. `check_integrity` holds the lock for O(pool); what else a call costs is said at `Session`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_slots: int = SLICE_SLOTS,
    ) -> None:
        """`slice_slots`: how many slots bulk work visits before it releases the lock."""
        super().__init__(Pool(config, clock, slice_slots=slice_slots))
        self.config = config
        self.engine_id = self.pool.desired.engine_id
        self.admin = Administrator(self.pool)

    def close(self) -> None:
        """The host stops: nothing is served from now on. Idempotent."""
        with self.pool.lock:
            self.acceptance.closed = self.pool.closed = True

    @property
    def events(self) -> BlockEventLog:
        return self.pool.events

    def tick(self) -> None:
        """See `Pool.tick`."""
        self.pool.tick()

    def check_integrity(self) -> None:
        """See `Pool.check_integrity`."""
        self.pool.check_integrity()

    def count_error(self, code: str) -> None:
        """Count an error of the host; `code` is one of `kvstow.stats.ERRORS`."""
        with self.pool.lock:
            self.pool.counters.faults.errors[code] += 1

    # -- snapshots ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """One consistent copy of all counters. O(1)."""
        return snapshots.stats(self.pool)

    def readiness(self) -> Readiness:
        """Whether traffic can flow, the reason if not, and the status of each rank. O(ranks)."""
        return snapshots.readiness(self.pool)

    def transfers(self, limit: int = 1000) -> list[TransferStatus]:
        """Ops in flight, oldest first."""
        return snapshots.transfers(self.pool, limit)

    def block(self, key: bytes) -> BlockStatus | None:
        """The visible block under `key`."""
        return snapshots.block(self.pool, key)

    def blocks(self, start_slot: int = 0, limit: int = 100) -> BlockPage:
        """Visible blocks in order of their slots, from `start_slot` on. Visits 1,024 slots at most: a page may be short
        or empty and still have a `next_slot`."""
        return snapshots.blocks(self.pool, start_slot, limit)
