"""The worker side: one rank's data plane, driven by the steps of its vLLM worker. It also has the object that replaces
the data plane while there is none, and decides on the memory of the rank's pool."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.devices.base import Fence, LayeredLoad
from kvstow.errors import InsufficientMemoryError, LoadRefusedError
from kvstow.memory.limits import limits_of
from kvstow.memory.region import round_up
from kvstow.memory.slotpool import SlotPool
from kvstow.messages import Completion, DesiredState, RankReport, RankState, StepPlan
from kvstow_service.connectors.engine_core.options import ConnectorOptions, refusal
from kvstow_service.connectors.engine_core.stepplan import BootCompletions, FinishedLoads, LoadId, PlannedStep
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess

if TYPE_CHECKING:
    from kvstow.attach.worker import AttachedWorker
    from kvstow.dataplane import DataPlane

logger = logging.getLogger("kvstow.vllm")


def require_memory(options: ConnectorOptions, process: VLLMProcess) -> int:
    """How many bytes are available to the pools of this node's ranks together; 0 if no limit can be read. Raises
    `InsufficientMemoryError` if the pools do not fit. Call it before any of them begins to pin."""
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


def rank_pool_config(options: ConnectorOptions, slot_bytes: int, pool_bytes: int, max_bytes: int) -> PoolConfig:
    """The configuration of a rank's pool, which gets `pool_bytes` at first and may grow to `max_bytes`. Raises
    `ConfigError`."""
    if (most := max(pool_bytes, max_bytes)) < slot_bytes:
        raise refusal("cpu_bytes_to_use", most, f"at least one block, {slot_bytes} bytes on this rank")
    return options.pool_config(slot_bytes, max(slot_bytes, pool_bytes), max_bytes)


def wait_until_pinned(pool: SlotPool) -> None:
    """Return when the pool has reached its size or stopped growing."""
    changed = threading.Event()
    pool.add_listener(changed.set)
    while pool.status().state == "pinning":
        changed.wait()
        changed.clear()


class NoDataPlane:
    """Replaces the data plane of a rank before it has one, while vLLM sleeps, and after an error.

    It fails every op, so that each load ends for vLLM. Used like a `DataPlane`.
    """

    is_pinning = False
    layered: None = None

    def __init__(self, rank: int, slot_bytes: int, reason: str | None = None, error: str | None = None) -> None:
        self.boot_id = secrets.token_hex(8)
        state: RankState = "stopped" if error is None else "failed"
        self._report = RankReport.without_pool(rank, self.boot_id, state, slot_bytes, error_reason=reason, error=error)
        self.applied = DesiredState("", 0, number=0)
        """The desired state with which the next data plane begins."""
        self._completions: list[Completion] = []

    # There is nothing to pin, no copy is under way, and the report changes only with the desired state.
    def start(self, *, at_ease: bool = False) -> None: ...
    def launched(self, work: Fence | None = None) -> None: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def drive(self) -> None: ...
    def add_listener(self, callback: Callable[[], None]) -> None: ...

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self._completions += [Completion(op.op_id, "failed", "this rank has no data plane") for op in plan.ops]

    def take_completions(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    def report(self) -> RankReport:
        return replace(self._report, engine_id=self.applied.engine_id, applied=self.applied.number)

    def apply(self, desired: DesiredState) -> None:
        if desired.replaces(self.applied):
            self.applied = desired

    def close(self, timeout: float = 5.0) -> bool:
        return True


RankDataPlane: TypeAlias = "DataPlane | AttachedWorker | NoDataPlane"


class LayerWaits:
    """Makes one rank's computation wait for the load by layer of its step. `part_of[layer]` is the part of the KV cache
    that the layer reads last.

    vLLM calls a hook before a layer attends, on the thread that launches the layer. With data-parallel micro-batches
    there are several such threads, each with a stream of its own. So each thread waits, even if another one has done so
    before. Some layers have never called their hook, because they are in CUDA graphs, or do not attend. The computation
    waits for these before it begins.
    """

    def __init__(self) -> None:
        self.part_of: Mapping[str, int] = {}
        self._hooked: set[str] = set()
        self._load: LayeredLoad | None = None

    def begin(self, load: LayeredLoad, num_parts: int, *, hooks_run: bool) -> None:
        """Begin the computation that uses this load. `hooks_run`: whether layers call their hooks in this step."""
        self._load = load
        hooked = self._hooked if hooks_run else set()
        missing = [part for layer, part in self.part_of.items() if layer not in hooked]
        if missing or not self.part_of:
            load.wait(max(missing) if missing else num_parts - 1)

    def layer(self, name: str) -> None:
        self._hooked.add(name)
        if self._load is not None and (part := self.part_of.get(name)) is not None:
            self._load.wait(part)

    def end(self, num_parts: int) -> None:
        """Make all work after the computation, which is launched by now, wait for the whole load: later requests find
        the blocks on the GPU, and freed blocks are written again."""
        load, self._load = self._load, None
        if load is not None:
            load.wait(num_parts - 1)


_Load = tuple[LoadId, tuple[int, ...]]
"""A load and its GPU blocks."""


class WorkerSide:
    """Starts the ops of each step on one rank, and reports how they end.

    Used by the worker's main thread, except `report`, `apply` and `add_listener`, which the rank's agent calls
    (`ReportingRank`).

    Order: a step's stores read what older steps have computed. They wait for the work that the compute stream holds
    when the step begins, and for nothing later. The step's loads wait, too, unless vLLM guarantees that no older step
    still writes their blocks. Whichever hook a version of vLLM calls first, the ops are submitted once, before the step
    computes.
    """

    def __init__(self, rank: int, plane: RankDataPlane, *, loads_wait: bool, takes_back: bool = False) -> None:
        """`takes_back`: whether vLLM can take back a step whose load by layer was refused (`VLLMProcess`)."""
        self.rank, self.plane, self._takes_back = rank, plane, takes_back
        self._refused: set[int] = set()
        """GPU blocks that this step computes with, although they were not loaded."""
        self.fence: Callable[[], Fence | None] = lambda: None
        """Makes a fence for all work given to the compute stream so far. Returns None if that work is always done."""
        self.stores_fail_because: str | None = None
        """Why no store may begin now; None if stores may begin."""
        self.ended_loads: tuple[LoadId, ...] = ()
        """The last result of `take_finished_loads`, load by load."""
        self._loads_wait = loads_wait
        self._step = 0
        self._loading: dict[int, _Load] = {}  # by op
        self._done: list[_Load] = []
        self._failed: list[_Load] = []
        self._completed: tuple[BootCompletions, ...] = ()
        self._layered = StepPlan()  # loads that have to begin before this step computes
        self.waits = LayerWaits()
        self._is_off_reported = False
        self._replacing = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def begin_step(self, step: PlannedStep) -> None:
        """Submit the ops of a step. Later calls for the same step do nothing."""
        if step.number == self._step:
            return
        self._step = step.number
        self.plane.begin_step()
        self._failed += [(LoadId(name, step.number), blocks) for name, blocks in step.lost_loads.items()]
        for op, request_id in zip(step.loads.ops, step.load_requests, strict=True):
            self._loading[op.op_id] = LoadId(request_id, step.number), op.blocks
        self._layered = step.layered
        if step.stores.ops and self.stores_fail_because is not None:
            step = self._without_stores(step, self.stores_fail_because)
        if not (step.stores.ops or step.loads.ops or step.layered.ops):
            return
        fence = self.fence() if step.stores.ops or self._loads_wait else None
        if step.loads.ops:
            self.plane.submit(step.loads, fence if self._loads_wait else None)
            self.plane.drive()  # a request waits for these loads
        if step.stores.ops:
            self.plane.submit(step.stores, fence)

    def _without_stores(self, step: PlannedStep, reason: str) -> PlannedStep:
        """Fail the stores of a step. Loads among them, which were given up, end as usual, because a load that fails
        takes its blocks from all engines that share them."""
        stores = [op for op in step.stores.ops if op.direction == "store"]
        failed = tuple([Completion(op.op_id, "failed", reason) for op in stores])
        self._completed += (BootCompletions(self.plane.boot_id, failed),)
        return step._replace(stores=StepPlan(tuple([op for op in step.stores.ops if op.direction == "load"])))

    def load_layers(self, *, hooks_run: bool) -> None:
        """Begin the step's loads by layer, before it computes. If a load is refused, the step reports its blocks as
        invalid. Raises if vLLM cannot take that back, or if there is no way to load."""
        plan, self._layered = self._layered, StepPlan()
        if not plan.ops:
            return
        layered = self.plane.layered
        try:
            if layered is None or any(op.boots and op.boots[self.rank] != self.plane.boot_id for op in plan.ops):
                self.plane.submit(StepPlan(tuple([replace(op, blocks=(), slots=()) for op in plan.ops])))
                raise LoadRefusedError("this step computes with blocks of host memory that this rank has lost")
            load = layered.load(plan.ops, self.fence())
        except LoadRefusedError as error:
            if not self._takes_back:
                raise
            logger.warning("rank %d: a step computes again what it could not load: %s", self.rank, error)
            self._refused.update(block for op in plan.ops for block in op.blocks)
            return
        if load is not None:
            self.waits.begin(load, layered.num_parts, hooks_run=hooks_run)

    def wait_for_layer(self, name: str) -> None:
        if self._layered.ops:  # this version of vLLM begins loads after the computation
            self.load_layers(hooks_run=False)
        self.waits.layer(name)

    def take_layers_off(self) -> str | None:
        """Why this rank loads nothing by layer any more. Returned once; None otherwise."""
        layered = self.plane.layered
        if layered is None or layered.failure is None or self._is_off_reported:
            return None
        self._is_off_reported = True
        return layered.failure

    def launched(self) -> None:
        """Called when vLLM has launched the forward pass of a step. It is not called in steps without a forward
        pass."""
        if (layered := self.plane.layered) is not None:
            self.waits.end(layered.num_parts)
        self.plane.launched(self.fence() if self.plane.is_pinning else None)

    def take_finished_loads(self) -> FinishedLoads:
        """The loads that have ended since the last call, done and failed in one snapshot. `take_boot_completions`
        returns the completions of the same snapshot. vLLM calls it at the end of each step."""
        self.plane.end_step()
        self.plane.drive()
        self._collect()
        done, failed = self._done, self._failed
        refused, self._refused = self._refused, set()
        self._done, self._failed = [], []
        self.ended_loads = tuple([load for load, _ in (*done, *failed)])
        return FinishedLoads(
            {load.request_id for load in self.ended_loads},
            {load.request_id for load, _ in failed},
            refused.union(*[blocks for _, blocks in failed]),
        )

    def take_boot_completions(self) -> tuple[BootCompletions, ...]:
        """The completions that were collected since the last call, for the scheduler side."""
        completed, self._completed = self._completed, ()
        return completed

    def close_plane(self) -> bool:
        """Close the data plane. Ops under way fail, and it touches no memory after that. Returns False while a copy
        hangs in the device. Call `replace_plane` only after it has returned True, because the control plane takes a new
        boot as the sign that the old one has ended."""
        ended = self.plane.close()
        self._collect()
        return ended

    def replace_plane(self, plane: RankDataPlane) -> None:
        """Restart the rank with another data plane. It begins with the current desired state, so that no late answer to
        the old one can mislead it."""
        with self._replacing:
            applied = self.plane.applied
            if applied.engine_id:
                plane.apply(applied)
            self.plane = plane
        for callback in self._callbacks:
            plane.add_listener(callback)
            callback()

    # -- for the agent --------------------------------------------------------------------------------------

    def report(self) -> RankReport:
        return self.plane.report()

    def apply(self, desired: DesiredState) -> None:
        with self._replacing:
            plane = self.plane
            plane.apply(desired)
        plane.start()  # at full pace, because an engine that answers has started

    def add_listener(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self.plane.add_listener(callback)

    def _collect(self) -> None:
        if not (completions := self.plane.take_completions()):
            return
        self._completed += (BootCompletions(self.plane.boot_id, tuple(completions)),)
        for completion in completions:
            if completion.mark != "source_free" and (load := self._loading.pop(completion.op_id, None)) is not None:
                (self._failed if completion.mark == "failed" else self._done).append(load)
