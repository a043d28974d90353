"""An engine with its ranks in this process, on which `kvstow replay` runs without a node service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import PinError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import MlockRegistrar
from kvstow_service.replay.kv import HostKV, LocalKV
from kvstow_service.replay.trace import Shape, even_shape

_POLL = 0.01


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank whose data plane is in this process. The data plane owns the pool. `worker.start` begins to pin, and
    `worker.close` ends the whole rank."""

    worker: DataPlane
    pool: HostPool
    kv: HostKV


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int, shape: Shape | None = None) -> list[LocalRank]:
    """Make `num_ranks` ranks, each with a KV cache of `kv_blocks` blocks. Without a `shape`, the cache has a few equal
    layers. Nothing is pinned yet. Raises `InsufficientMemoryError` for a pool or a KV cache that cannot fit. Then no
    rank is left."""
    layout = (shape or even_shape(config.slot_bytes)).layout(kv_blocks)
    ranks: list[LocalRank] = []
    with ExitStack() as undo:
        for number in range(num_ranks):
            with ExitStack() as parts:
                kv = HostKV.allocate(number, layout)
                pool = HostPool(config, MlockRegistrar())
                parts.callback(pool.close)
                device = CpuDevice(pool, layout, kv.regions)
                parts.callback(device.close)
                ranks.append(LocalRank(DataPlane(number, pool, device), pool, kv))
                parts.pop_all()
            undo.callback(ranks[-1].worker.close)
        undo.pop_all()
    return ranks


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """An engine and its ranks for a replay. The context manager that made it owns it."""

    engine: OffloadEngine
    ranks: Sequence[LocalRank]

    @property
    def workers(self) -> list[DataPlane]:
        return [rank.worker for rank in self.ranks]

    @property
    def kv(self) -> LocalKV:
        return LocalKV([rank.kv for rank in self.ranks])


@contextmanager
def local_session(
    config: EngineConfig,
    *,
    kv_blocks: int,
    stop: threading.Event,
    shape: Shape | None = None,
    on_pinned: Callable[[int], None] = lambda slots: None,
) -> Iterator[ReplaySession]:
    """Yield a session once every slot is usable, so that figures can be repeated, or once `stop` is set. Until then,
    `on_pinned` gets the number of usable slots. Raises `PinError` and the errors of `build_ranks`."""
    pool = PoolConfig(slot_bytes=config.slot_bytes, pool_bytes=config.slot_bytes * config.capacity_slots)
    with ExitStack() as stack:
        engine = OffloadEngine(config)
        stack.callback(engine.close)
        session = ReplaySession(engine, build_ranks(config.num_ranks, pool, kv_blocks, shape))
        for worker in session.workers:
            stack.callback(worker.close)
        for worker in session.workers:
            worker.start()
        while not stop.is_set():
            for worker in session.workers:
                report = worker.report()
                if report.error is not None:
                    raise PinError(report.error_reason or "driver", f"rank {report.rank}: {report.error}")
                worker.apply(engine.report(report))
            usable = engine.readiness().usable_slots
            on_pinned(usable)
            if usable >= config.capacity_slots:
                break
            time.sleep(_POLL)
        yield session
