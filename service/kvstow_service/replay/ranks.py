"""An engine with its ranks in this process: what `kvstow replay` runs on, and its admin server.

Each rank's pool, device, KV cache and worker are made and closed together. Plans go to every worker, and completions
come from each. A simulated rank has no memory: everything is pinned from the start and every op is done at once.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import PinError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import MlockRegistrar
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, Op, RankReport, StepPlan
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import RankAgent, Rendezvous
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.replay.kv import HostKV, KVCache, LocalKV, NoKV
from kvstow_service.replay.trace import Shape, even_shape


class RankWorker(Protocol):
    """What the replay needs of a rank's worker."""

    @property
    def boot_id(self) -> str: ...

    def submit(self, plan: StepPlan) -> None: ...

    def take_completions(self) -> list[Completion]: ...

    def wait_completions(self, timeout: float) -> bool: ...


class RankCompletions(NamedTuple):
    rank: int
    boot_id: str
    completions: list[Completion]


class RankWorkers:
    """Knows which ops each rank has not finished. Used by one thread."""

    def __init__(self, workers: Sequence[RankWorker]) -> None:
        self._workers = workers
        self._outstanding: list[set[int]] = [set() for _ in workers]

    def __len__(self) -> int:
        return len(self._workers)

    def submit(self, ops: Sequence[Op]) -> None:
        """One step of every rank, after what its device was given so far."""
        plan = StepPlan(tuple(ops))
        for worker, outstanding in zip(self._workers, self._outstanding, strict=True):
            outstanding.update(op.op_id for op in plan.ops)
            worker.submit(plan)

    def take_completions(self) -> Iterator[RankCompletions]:
        """Of each rank that has any."""
        for rank, worker in enumerate(self._workers):
            completions = worker.take_completions()
            if completions:
                self._outstanding[rank].difference_update(one.op_id for one in completions if one.mark != "source_free")
                yield RankCompletions(rank, worker.boot_id, completions)

    def wait(self, timeout: float) -> bool:
        """Wait for completions of the first rank that has an op. False, at once, if none has."""
        for worker, outstanding in zip(self._workers, self._outstanding, strict=True):
            if outstanding:
                worker.wait_completions(timeout)
                return True
        return False


class SimulatedWorker:
    """Looks like a rank's worker to the replay, for measuring the control plane alone. One thread uses it."""

    def __init__(self, rank: int, slot_bytes: int, num_slots: int) -> None:
        self.boot_id = secrets.token_hex(8)
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._newest = NewestDesiredState()
        self._sender = ReportSequence()
        self._completions: list[Completion] = []

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self._completions.extend(Completion(op.op_id, "done") for op in plan.ops)

    def take_completions(self) -> list[Completion]:
        taken, self._completions = self._completions, []
        return taken

    def wait_completions(self, timeout: float) -> bool:
        """Never waits: nothing arrives by itself."""
        return bool(self._completions)

    def report(self) -> RankReport:
        return self._sender.next_report(self._look)

    def _look(self) -> RankReport:
        slots = self._num_slots
        num_bytes = slots * self._slot_bytes
        return RankReport(
            rank=self._rank,
            boot_id=self.boot_id,
            state="ready",
            slot_bytes=self._slot_bytes,
            pinned_slots=slots,
            target_slots=slots,
            pinned_bytes=num_bytes,
            target_bytes=num_bytes,
            pin_mode="simulated",
            uncollected_completions=len(self._completions),
            engine_id=self._newest.applied.engine_id,
            applied=self._newest.applied.number,
            sender="",
            number=0,
        )

    def apply(self, desired: DesiredState) -> None:
        self._newest.apply_if_newer(desired, self._resize)

    def _resize(self, desired: DesiredState) -> None:
        self._num_slots = desired.capacity_slots


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank whose data plane lives in this process, and owns the pool. `worker.start` begins to pin, and
    `worker.close` ends all of it."""

    worker: DataPlane
    pool: HostPool
    layout: KVLayout
    kv: HostKV


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int, shape: Shape | None = None) -> list[LocalRank]:
    """`num_ranks` ranks, all or none. Pins nothing yet. Raises what `build_rank` raises."""
    with ExitStack() as undo:
        ranks = []
        for rank in range(num_ranks):
            ranks.append(build_rank(rank, config, kv_blocks, shape))
            undo.callback(ranks[-1].worker.close)
        undo.pop_all()
    return ranks


def build_rank(rank: int, config: PoolConfig, kv_blocks: int, shape: Shape | None = None) -> LocalRank:
    """One rank with a KV cache of `kv_blocks` blocks; without a `shape`, of a few equal layers. Pins nothing yet.

    Raises `InsufficientMemoryError` for a pool or a KV cache that cannot fit.
    """
    layout = (shape or even_shape(config.slot_bytes)).layout(kv_blocks)
    kv = HostKV.allocate(rank, layout)
    with ExitStack() as undo:
        pool = HostPool(config, MlockRegistrar())
        undo.callback(pool.close)
        device = CpuDevice(pool, layout, kv.regions)
        undo.callback(device.close)
        local = LocalRank(DataPlane(rank, pool, device), pool, layout, kv)
        undo.pop_all()
    return local


_POLL = 0.01


class ReportingWorker(RankWorker, Protocol):
    """A worker whose rank the session reports."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """What a replay needs, with all slots usable. Owned by the context manager that gave it. `ranks`:
    those of the workers that have memory."""

    engine: OffloadEngine
    workers: Sequence[ReportingWorker]
    kv: KVCache
    ranks: Sequence[LocalRank] = ()


@contextmanager
def simulated_session(config: EngineConfig) -> Iterator[ReplaySession]:
    """The control plane alone: no memory and no copies."""
    with ExitStack() as stack:
        engine = OffloadEngine(config)
        stack.callback(engine.close)
        workers = [SimulatedWorker(rank, config.slot_bytes, config.capacity_slots) for rank in range(config.num_ranks)]
        _report(engine, workers)
        yield ReplaySession(engine, workers, NoKV())


@contextmanager
def local_session(
    config: EngineConfig,
    *,
    kv_blocks: int,
    stop: threading.Event,
    shape: Shape | None = None,
    on_pinned: Callable[[int], None] | None = None,
) -> Iterator[ReplaySession]:
    """Ranks in this process. Returns when every slot is usable, so that figures repeat, or when `stop` is set.

    `shape`: see `build_rank`. `on_pinned` gets the number of usable slots while it waits. Raises
    `InsufficientMemoryError` or `PinError` where the pool or a KV cache cannot be made.
    """
    pool_bytes = config.slot_bytes * config.capacity_slots
    pool = PoolConfig(slot_bytes=config.slot_bytes, pool_bytes=pool_bytes)
    with ExitStack() as stack:
        engine = OffloadEngine(config)
        stack.callback(engine.close)
        ranks = build_ranks(config.num_ranks, pool, kv_blocks, shape)
        workers = [rank.worker for rank in ranks]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.start()
        while not stop.is_set():
            usable = _report(engine, workers)
            if on_pinned is not None:
                on_pinned(usable)
            if usable >= config.capacity_slots:
                break
            time.sleep(_POLL)
        yield ReplaySession(engine, workers, LocalKV([rank.kv for rank in ranks]), ranks)


def _report(engine: OffloadEngine, workers: Sequence[ReportingWorker]) -> int:
    """Report all ranks once and return the slots usable on all of them; raises a rank's `PinError`."""
    for worker in workers:
        report = worker.report()
        if report.error is not None:
            raise PinError(report.error_reason or "driver", f"rank {report.rank}: {report.error}")
        worker.apply(engine.report(report))
    return engine.readiness().usable_slots


@contextmanager
def replay_admin(session: ReplaySession, port: int) -> Iterator[EmbeddedAdmin]:
    """Serve the admin API of the session on a port of 127.0.0.1, whose ranks report to it from now on."""
    identity = f"replay-{os.getpid()}"
    with ExitStack() as stack:
        environ = {"XDG_RUNTIME_DIR": stack.enter_context(TemporaryDirectory(prefix="kvstow-"))}
        admin = EmbeddedAdmin(
            session.engine,
            AdminOptions(port=port),
            identity=identity,
            mode="replay",
            max_capacity_slots=session.engine.config.capacity_slots,
            head_start=0.0,
            environ=environ,
        )
        admin.start()
        stack.callback(admin.stop)
        for number, rank in enumerate(session.ranks):
            agent = RankAgent(number, rank.worker, Rendezvous(identity, environ))
            agent.start()
            stack.callback(agent.stop)
        yield admin
