"""A replay without a node service: its engine and its ranks are in this process, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvstow.config import PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import LeaseError
from kvstow.keys import BlockKey
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import MlockRegistrar
from kvstow.messages import Completion, Op, StepPlan
from kvstow.results import NO_LEASE, Awaited, Given, Lease, StoreGrant
from kvstow_service.replay.driver import ReplayDriver
from kvstow_service.replay.kv import HostKV, Verification
from kvstow_service.replay.offload import AttachedOffload
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.trace import ReplayOptions, TraceRequest, ending_of_trace, even_shape

_MOMENT = 0.001
"""How long a replay waits for one rank before it looks at the next."""


class Worker(Protocol):
    """A rank's worker in this process, such as a `DataPlane`."""

    @property
    def boot_id(self) -> str: ...

    def submit(self, plan: StepPlan) -> None: ...

    def take_completions(self) -> list[Completion]: ...

    def wait_completions(self, timeout: float) -> bool: ...


class EmbeddedOffload:
    """Stands in for an `AttachedOffload`, with an engine and workers of this process."""

    def __init__(self, engine: OffloadEngine, workers: Sequence[Worker]) -> None:
        self.engine, self.workers = engine, workers
        self._evicted_before = engine.stats().evicted_for_capacity
        self._numbers: dict[int, int] = {}
        """The control plane's numbers of the running requests."""

    def step(self) -> None:
        """Does nothing, because the engine's host ticks it."""

    def wait(self, seconds: float) -> None:
        if not self.engine.open_transfers:
            time.sleep(seconds)  # only time brings news
        for worker in self.workers:
            if worker.wait_completions(min(seconds, _MOMENT)):
                return

    def admit(self, number: int, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        lease = self.engine.acquire(keys)
        self._numbers[number] = self.engine.admit(keys)
        return Given(lease)

    def end(self, number: int, stop: str | None) -> bool:
        return self.engine.end_request(self._numbers.pop(number), ending_of_trace(stop)).is_incomplete

    def hold(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        return Given(self.engine.lease(keys) or NO_LEASE)

    def release(self, held: Awaited[Lease]) -> None:
        self.engine.release_lease(held.value)

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Awaited[Op | None]:
        try:
            return Given(self.engine.begin_load(lease, blocks, request_id=request_id))
        except LeaseError:
            self.engine.release_lease(lease)
            return Given(None)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]:
        return Given(self.engine.begin_store(keys, blocks, request_id=request_id))

    def figures(self) -> dict[str, Any]:
        stats = self.engine.stats()
        evicted = stats.evicted_for_capacity - self._evicted_before
        return {"slots": stats.pool.capacity_slots, "policy": stats.pool.policy, "evicted_blocks": evicted}


class LocalRanks:
    """Stands in for `RemoteRanks`, with workers and KV caches of this process. There may be no KV caches."""

    is_verifying = False

    def __init__(self, workers: Sequence[Worker], caches: Sequence[HostKV] = ()) -> None:
        self.workers = workers
        self._caches = caches
        self._found: list[Verification] = []

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for kv in self._caches:
            kv.write(keys, blocks)

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._found.append(Verification.of_ranks([kv.check(keys, blocks) for kv in self._caches]))

    def scrub(self, blocks: Sequence[int]) -> None:
        for kv in self._caches:
            kv.scrub(blocks)

    def take_verifications(self) -> list[Verification]:
        found, self._found = self._found, []
        return found


def replay_driver(
    offload: EmbeddedOffload,
    ranks: LocalRanks,
    requests: Sequence[TraceRequest],
    options: ReplayOptions,
    *,
    kv_blocks: int,
    on_request: Callable[[int], None] = lambda finished: None,
) -> ReplayDriver:
    return ReplayDriver(
        cast(AttachedOffload, offload),
        cast(RemoteRanks, ranks),
        requests,
        options,
        kv_blocks=kv_blocks,
        on_request=on_request,
    )


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank whose data plane is in this process. The data plane owns the pool. `worker.start` begins to pin, and
    `worker.close` ends the whole rank."""

    worker: DataPlane
    pool: HostPool
    kv: HostKV


def build_ranks(num_ranks: int, config: PoolConfig, kv_blocks: int) -> list[LocalRank]:
    """Make `num_ranks` ranks, each with a KV cache of `kv_blocks` blocks in a few equal layers. Nothing is pinned yet.
    Raises `InsufficientMemoryError` for a pool or a KV cache that cannot fit. Then no rank is left."""
    layout = even_shape(config.slot_bytes).layout(kv_blocks)
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

    def driver(self, requests: Sequence[TraceRequest], options: ReplayOptions, *, kv_blocks: int) -> ReplayDriver:
        offload = EmbeddedOffload(self.engine, self.workers)
        ranks = LocalRanks(self.workers, [rank.kv for rank in self.ranks])
        return replay_driver(offload, ranks, requests, options, kv_blocks=kv_blocks)
