"""All ranks of the standalone process: built in the background, each with its agent, closed together."""

from __future__ import annotations

import gc
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstow.config import PoolConfig
from kvstow.errors import KvstowError
from kvstow.messageorder import ReportSequence
from kvstow.messages import DesiredState, RankReport
from kvstow_service.agent import AdminAddress, RankAgent, ReportingRank
from kvstow_service.replay.place import ON_CPU, Place

if TYPE_CHECKING:
    from kvstow_service.replay.ranks import LocalRank

logger = logging.getLogger("kvstow.fleet")

_BUILD_SECONDS = 60.0  # importing torch cannot be interrupted; it takes seconds on a cold disk


class Fleet:
    """The ranks `0..num_ranks - 1` of this process.

    Guarantees: `start` returns at once; torch is imported on the fleet's thread. A rank that cannot be built
    reports why, like any other failure, and the others go on. `close` is idempotent, stops each agent before it
    closes the agent's worker, and leaves no memory registered.
    """

    def __init__(
        self,
        num_ranks: int,
        pool: PoolConfig,
        kv_blocks: int,
        server: AdminAddress,
        *,
        place: Place = ON_CPU,
    ) -> None:
        self._num_ranks = num_ranks
        self._pool = pool
        self._kv_blocks, self._place = kv_blocks, place
        self._server = server
        self._local: list[LocalRank] = []
        self._resources = ExitStack()
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._build, name="kvstow-fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ranks(self) -> list[LocalRank] | None:
        """Every rank, or None when one could not be built. Waits until that is known, or until `close`."""
        self._settled.wait()
        return list(self._local) if len(self._local) == self._num_ranks else None

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_BUILD_SECONDS)
        self._settled.set()
        self._resources.close()

    def _build(self) -> None:
        try:
            for rank in range(self._num_ranks):
                if self._closing.is_set():
                    return
                self._add(rank, self._build_or_explain(rank))
        except Exception:  # the missing reports fail readiness
            logger.exception("the ranks could not be started")
        finally:
            # What there is by now lives as long as the process. Walking it in every full collection would stop all
            # threads: for 60 ms with the index of a million slots.
            gc.freeze()
            self._settled.set()

    def _build_or_explain(self, rank: int) -> ReportingRank:
        try:
            from kvstow_service.replay.ranks import build_rank

            local = build_rank(rank, self._pool, self._kv_blocks, self._place)
        except Exception as error:  # reported and logged: the service goes on without this rank
            logger.error("rank %d cannot be built: %s", rank, error, exc_info=not isinstance(error, KvstowError))
            return UnbuiltRank(rank, self._pool, error)
        self._resources.callback(local.close)
        self._local.append(local)
        local.start_pinning()
        return local.worker

    def _add(self, rank: int, source: ReportingRank) -> None:
        agent = RankAgent(rank, source, self._server)
        agent.start()
        self._resources.callback(agent.stop)


class UnbuiltRank:
    """Stands in for a rank that could not be built: reports the reason and does nothing."""

    def __init__(self, rank: int, pool: PoolConfig, error: Exception) -> None:
        self._sender = ReportSequence()
        self._report = RankReport(
            sender="",
            number=0,
            rank=rank,
            boot_id=secrets.token_hex(8),
            state="failed",
            slot_bytes=pool.slot_bytes,
            pinned_slots=0,
            target_slots=pool.capacity_slots,
            pinned_bytes=0,
            target_bytes=pool.capacity_slots * pool.slot_bytes,
            error_reason=error.code if isinstance(error, KvstowError) else "internal",
            error=str(error) or repr(error),
        )

    def report(self) -> RankReport:
        return self._sender.next_report(lambda: self._report)

    def apply(self, desired: DesiredState) -> None:
        """There is nothing to steer."""

    def add_listener(self, callback: Callable[[], None]) -> None:
        """The report never changes."""
