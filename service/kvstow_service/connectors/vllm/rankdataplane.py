"""The data plane of one rank: made around the KV cache of a vLLM worker, or a stand-in where there is none.

Importing this module imports torch.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Device, Fence
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import limits_of
from kvstow.memory.mlock import cpu_registrar
from kvstow.memory.pinning import Registrar
from kvstow.memory.region import round_up
from kvstow.memory.slotpool import SlotPool
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, RankReport, RankState, StepPlan
from kvstow_service.connectors.engine_core.options import ConnectorOptions, refusal
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess
from kvstow_service.connectors.vllm.kvgeometry import KVGeometry


class NoDataPlane:
    """Stands for the data plane of a rank that has none: before it has one, while vLLM sleeps, or after an error.

    It fails every op, so that each load ends for vLLM. Used like a `DataPlane`.
    """

    is_pinning = False

    def __init__(
        self,
        rank: int,
        slot_bytes: int,
        reason: str | None = None,
        error: str | None = None,
        sender: ReportSequence | None = None,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        state: RankState = "stopped" if error is None else "failed"
        self._report = RankReport.without_pool(rank, self.boot_id, state, slot_bytes, error_reason=reason, error=error)
        self._newest = NewestDesiredState()
        self._sender = sender or ReportSequence()
        self._completions: list[Completion] = []

    def start(self, *, at_ease: bool = False) -> None:
        """There is nothing to pin."""

    def begin_step(self) -> None:
        """There is nothing to pin, and no copy is under way."""

    def launched(self, work: Fence | None = None) -> None:
        """As `begin_step`."""

    end_step = drive = begin_step

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self._completions += [Completion(op.op_id, "failed", "this rank has no data plane") for op in plan.ops]

    def take_completions(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    def report(self) -> RankReport:
        return self._sender.next_report(self._current_report)

    def _current_report(self) -> RankReport:
        applied = self._newest.applied
        return replace(
            self._report, engine_id=applied.engine_id, applied=applied.number, stale_desired_states=self._newest.stale
        )

    def apply(self, desired: DesiredState) -> None:
        """Remember it: the next data plane begins with it."""
        self._newest.apply_if_newer(desired, lambda _: None)

    @property
    def applied(self) -> DesiredState:
        return self._newest.applied

    def add_listener(self, callback: Callable[[], None]) -> None:
        """The report never changes."""

    def close(self, timeout: float = 5.0) -> bool:
        """It holds nothing."""
        return True


MakePool = Callable[[Registrar, int | None], SlotPool]
"""Makes a pool, given the registrar and the NUMA node of the device."""


class RankDataPlane(Protocol):
    """What a `WorkerSide` needs: a `DataPlane`, an `AttachedPlane` or a `NoDataPlane`."""

    @property
    def boot_id(self) -> str: ...
    @property
    def is_pinning(self) -> bool: ...
    @property
    def applied(self) -> DesiredState: ...
    def start(self, *, at_ease: bool = False) -> None: ...
    def begin_step(self) -> None: ...
    def launched(self, work: Fence | None = None) -> None: ...
    def end_step(self) -> None: ...
    def submit(self, plan: StepPlan, after: Fence | None = None) -> None: ...
    def drive(self) -> None: ...
    def take_completions(self) -> list[Completion]: ...
    def report(self) -> RankReport: ...
    def apply(self, desired: DesiredState) -> None: ...
    def add_listener(self, callback: Callable[[], None]) -> None: ...
    def close(self, timeout: float = 5.0) -> bool: ...


def require_memory(options: ConnectorOptions, process: VLLMProcess) -> int:
    """Bytes available to the pools of this node's ranks together; 0 where no limit can be read. Raises
    `InsufficientMemoryError` if the pools do not fit. Call it before any of them has begun to pin."""
    limits = limits_of(options.huge_pages)
    shortage = limits.shortage(
        round_up(options.bytes_of_rank(process.num_ranks), limits.page_bytes) * process.ranks_per_node
    )
    if shortage is not None:
        raise InsufficientMemoryError(
            f"{process.ranks_per_node} x {format_size(options.bytes_of_rank(process.num_ranks))} of pool cannot fit: "
            f"{shortage.message}"
        )
    headroom = limits.headroom()
    return 0 if headroom is None else max(0, headroom.num_bytes - limits.reserve_bytes)


def build_plane(
    rank: int,
    pool_bytes: int,
    max_bytes: int,
    options: ConnectorOptions,
    kv: KVGeometry,
    sender: ReportSequence | None = None,
) -> DataPlane:
    """A rank's data plane around `kv`; pins nothing yet. If it raises a `KvstowError`, nothing is left behind."""
    slot_bytes = kv.layout.slot_bytes
    if (most := max(pool_bytes, max_bytes)) < slot_bytes:
        raise refusal("cpu_bytes_to_use", most, f"at least one block, {slot_bytes} bytes on this rank")
    config = options.pool_config(slot_bytes, max(slot_bytes, pool_bytes), max_bytes)

    def make_pool(registrar: Registrar, numa_node: int | None) -> HostPool:
        return HostPool(config, registrar, numa_node=numa_node)

    return plane_around(rank, kv, config, options, make_pool, sender)


def plane_around(
    rank: int,
    kv: KVGeometry,
    config: PoolConfig,
    options: ConnectorOptions,
    make_pool: MakePool,
    sender: ReportSequence | None = None,
) -> DataPlane:
    """A rank's data plane around `kv` and the pool that `make_pool` makes. As `build_plane` if it raises."""
    device = kv.tensors[0].device
    with ExitStack() as undo:
        if device.type == "cuda":
            pool, mover = _on_cuda(options, kv, make_pool, undo)
        elif device.type == "cpu":
            pool, mover = _on_cpu(config, kv, make_pool, undo)
        else:
            raise ConfigError("device of the KV cache", str(device), "cuda or cpu")
        undo.callback(mover.close)
        plane = DataPlane(rank, pool, mover, reports=sender)
        undo.pop_all()
    return plane


def _on_cpu(config: PoolConfig, kv: KVGeometry, make_pool: MakePool, undo: ExitStack) -> tuple[SlotPool, Device]:
    pool = make_pool(cpu_registrar(config), None)
    undo.callback(pool.close)
    return pool, CpuDevice(pool, kv.layout, kv.tensors)


def _on_cuda(
    options: ConnectorOptions, kv: KVGeometry, make_pool: MakePool, undo: ExitStack
) -> tuple[SlotPool, Device]:
    from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar

    registrar = CudaRegistrar(kv.tensors[0].device.index)
    pool = make_pool(registrar, registrar.numa_node)
    undo.callback(pool.close)
    strategy = CudaOptions(strategy=options.copy_strategy)
    return pool, CudaDevice(pool, kv.layout, kv.tensors, registrar=registrar, options=strategy)


def fence_of(kv_caches: Mapping[str, Any]) -> Callable[[], Fence | None]:
    """Makes fences for the work given to the compute stream of the KV cache so far. On the CPU it is done when its call
    returns."""
    first = next(iter(kv_caches.values()))
    device = (first if isinstance(first, torch.Tensor) else first[0]).device
    if device.type != "cuda":
        return lambda: None
    from kvstow.devices.cuda import CudaFence

    return lambda: CudaFence.record(torch.cuda.current_stream(device))


def wait_until_pinned(pool: SlotPool) -> None:
    """Return when the pool has its size or has stopped growing."""
    changed = threading.Event()
    pool.add_listener(changed.set)
    while pool.status().state == "pinning":
        changed.wait()
        changed.clear()
