"""An engine with its ranks in this process, without a server: what `kvstow replay` runs on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.errors import PinError
from kvstow.messages import DesiredState, RankReport
from kvstow_service.replay.kv import KVCache, LocalKV, NoKV
from kvstow_service.replay.ranks import LocalRank, build_ranks
from kvstow_service.replay.rankworkers import RankWorker
from kvstow_service.replay.shapes import Shape
from kvstow_service.replay.simulated import SimulatedWorker

_POLL = 0.01


class ReportingWorker(RankWorker, Protocol):
    """A worker whose rank the session reports."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    """What a replay needs, with all slots usable. Owned by the context manager that gave it. `ranks`:
    those of the workers that have memory."""

    engine: OffloadEngine
    workers: Sequence[ReportingWorker]
    kv: KVCache
    ranks: Sequence[LocalRank] = ()


@contextmanager
def simulated_session(config: EngineConfig) -> Iterator[Session]:
    """The control plane alone: no memory and no copies."""
    with ExitStack() as stack:
        engine = OffloadEngine(config)
        stack.callback(engine.close)
        workers = [SimulatedWorker(rank, config.slot_bytes, config.capacity_slots) for rank in range(config.num_ranks)]
        _report(engine, workers)
        yield Session(engine, workers, NoKV())


@contextmanager
def local_session(
    config: EngineConfig,
    *,
    kv_blocks: int,
    stop: threading.Event,
    shape: Shape | None = None,
    on_pinned: Callable[[int], None] | None = None,
) -> Iterator[Session]:
    """Ranks in this process. Returns when every slot is usable, so that figures repeat, or when `stop` is set.

    `shape`: see `build_rank`. `on_pinned` hears the number of usable slots while it waits. Raises
    `InsufficientMemoryError` or `PinError` where the pool or a KV cache cannot be made.
    """
    pool_bytes = config.slot_bytes * config.capacity_slots
    pool = PoolConfig(slot_bytes=config.slot_bytes, pool_bytes=pool_bytes)
    with ExitStack() as stack:
        engine = OffloadEngine(config)
        stack.callback(engine.close)
        ranks = build_ranks(config.num_ranks, pool, kv_blocks, shape)
        for rank in ranks:
            stack.callback(rank.close)
        for rank in ranks:
            rank.start_pinning()
        workers = [rank.worker for rank in ranks]
        while not stop.is_set():
            usable = _report(engine, workers)
            if on_pinned is not None:
                on_pinned(usable)
            if usable >= config.capacity_slots:
                break
            time.sleep(_POLL)
        yield Session(engine, workers, LocalKV([rank.kv for rank in ranks]), ranks)


def _report(engine: OffloadEngine, workers: Sequence[ReportingWorker]) -> int:
    """Report all ranks once and return the slots usable on all of them; raises a rank's `PinError`."""
    for worker in workers:
        report = worker.report()
        if report.error is not None:
            raise PinError(report.error_reason or "driver", f"rank {report.rank}: {report.error}")
        worker.apply(engine.report(report))
    return engine.readiness().usable_slots
