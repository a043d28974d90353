"""The worker's part of the fleet tier: transfers between the rank's pool and the store."""

from __future__ import annotations

import threading

from kvstow.dataplane import DataPlane
from kvstow.memory.hostpool import HostPool
from kvstow.memory.lentmemory import LentMemory
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.objectname import names_of_rank
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.store import TierStore
from kvstow_service.connectors.engine_core.workerside import RankClient


class RankTier:
    """The transfers of one boot of a rank. Used by the worker's main thread; only `close` waits."""

    def __init__(
        self, plane: DataPlane, pool: HostPool, store: TierStore, rank: int, num_ranks: int, *, replicated: bool
    ) -> None:
        """Connects in the background. `replicated`: all ranks hold the same bytes, which are one object. The owner
        calls `close` before it closes the data plane."""
        self.boot_id = plane.boot_id
        name_rank, name_ranks = (0, 1) if replicated else (rank, num_ranks)
        client = self._client = store.open_transfers(rank)
        self._memory = LentMemory(pool, client)
        self._transfers = RankTransfers(self._memory, client, names_of_rank(name_rank, name_ranks))
        plane.add_listener(self._memory.look)  # also after a change of the target, which the pool does not report

    def submit(self, op: TierOp) -> None:
        self._transfers.submit(op)

    def take_completions(self) -> list[TierCompletion]:
        """All ops that have ended since the last call. Also works after `close`."""
        return self._transfers.take_completions()

    def state(self) -> RankClient:
        return RankClient(self._client.health(), self._client.stats())

    def begin_close(self) -> None:
        """Like `close`, but on its own thread."""
        threading.Thread(target=self.close, name="kvstow-tier-end", daemon=True).start()

    def close(self) -> None:
        """End all transfers. After that, nothing touches the pool. Idempotent."""
        self._memory.stop()
        self._transfers.close()
        self._memory.close()
