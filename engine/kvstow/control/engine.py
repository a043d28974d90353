"""The control plane of an embedded engine: a pool and its only session."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstow.config import EngineConfig
from kvstow.control.pool import Pool
from kvstow.control.poolfacade import PoolFacade
from kvstow.control.session import Session
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.status import HOST_NAME


class OffloadEngine(Session, PoolFacade):
    """A pool with one session, in the same process. The pool's memory is that of the session's ranks, and is lost when
    one of them restarts.

    Decides which block is in which slot, and tracks every copy until all ranks have finished it. Guarantees: a key is
    visible only once every rank holds its bytes. A slot is reused only when no rank may still read or write it. Op ids
    are never reused. What a call costs is said at `Session` and `PoolFacade`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_slots: int = SLICE_SLOTS,
    ) -> None:
        """`slice_slots`: how many slots bulk work visits before it releases the lock."""
        Session.__init__(self, Pool(config, clock, slice_slots=slice_slots), HOST_NAME)
        PoolFacade.__init__(self, self.pool)
        self.name = self.engine_id

    def close(self) -> None:
        """The host stops: nothing is served from now on. Idempotent."""
        with self.pool.lock:
            self.acceptance.closed = self.pool.closed = True
