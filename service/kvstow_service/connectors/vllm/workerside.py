"""The worker side: one rank's data plane, driven by the steps of its vLLM worker."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from kvstow.devices.base import Fence
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, RankReport, StepPlan
from kvstow_service.connectors.vllm.stepplan import PlannedStep


class DataPlane(Protocol):
    """What is used of a rank's `DataPlane`."""

    @property
    def boot_id(self) -> str: ...

    def start(self, *, at_ease: bool = False) -> None: ...

    def begin_step(self) -> None: ...

    def launched(self) -> None: ...

    def end_step(self) -> None: ...

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None: ...

    def drive(self) -> None: ...

    def take_completions(self) -> list[Completion]: ...

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...

    @property
    def applied(self) -> DesiredState: ...

    def add_listener(self, callback: Callable[[], None]) -> None: ...

    def close(self, timeout: float = 5.0) -> bool: ...


class FinishedLoads(NamedTuple):
    """Requests whose loads have ended on this rank. `failed` is a part of `done`; `bad_blocks` are theirs."""

    done: set[str]
    failed: set[str]
    bad_blocks: set[int]


class News(NamedTuple):
    """Completions, and the boot of the rank that they are of."""

    boot_id: str
    completions: tuple[Completion, ...]


class _Load(NamedTuple):
    request_id: str
    blocks: tuple[int, ...]


class WorkerSide:
    """Starts the ops of each step on one rank, and says what became of them. Used by the worker's main thread, all but
    `plane`, which the rank's agent reads.

    Order. A step's stores read what older steps have computed, so they wait for what the compute stream holds when the
    step begins and for nothing later; so do its loads, where vLLM does not rule out by itself that an older step still
    writes their blocks. Whatever the version calls first, it is submitted once, before the step computes.
    """

    def __init__(self, rank: int, plane: DataPlane, *, fence: Callable[[], Fence | None], loads_wait: bool) -> None:
        """`fence()` names all work given to the compute stream so far; None where that is always done."""
        self.rank, self.plane = rank, plane
        self._fence, self._loads_wait = fence, loads_wait
        self._step = 0
        self._loading: dict[int, _Load] = {}  # by op
        self._done: list[_Load] = []
        self._failed: list[_Load] = []
        self._news: list[News] = []

    def begin_step(self, step: PlannedStep) -> None:
        """Submit the ops of a step; a step that was seen before is left alone."""
        if step.number == self._step:
            return
        self._step = step.number
        self.plane.begin_step()
        self._failed += [_Load(request_id, blocks) for request_id, blocks in step.lost_loads.items()]
        for op, request_id in zip(step.loads.ops, step.load_requests, strict=True):
            self._loading[op.op_id] = _Load(request_id, op.blocks)
        if not (step.stores.ops or step.loads.ops):
            return
        if step.boots[self.rank] != self.plane.boot_id:
            self._refuse(step)
            return
        fence = self._fence() if step.stores.ops or self._loads_wait else None
        if step.loads.ops:
            self.plane.submit(step.loads, fence if self._loads_wait else None)
            self.plane.drive()  # a request waits for it
        if step.stores.ops:
            self.plane.submit(step.stores, fence)

    def launched(self) -> None:
        """vLLM has launched the forward pass of a step; steps without one end without it."""
        self.plane.launched()

    def take_finished_loads(self) -> FinishedLoads:
        """What has ended since the last call: done and failed in one snapshot, which `take_news` returns too. vLLM
        calls it at the end of each step."""
        self.plane.end_step()
        self.plane.drive()
        self._hear(self.plane)
        done, failed = self._done, self._failed
        self._done, self._failed = [], []
        return FinishedLoads(
            {load.request_id for load in (*done, *failed)},
            {load.request_id for load in failed},
            {block for load in failed for block in load.blocks},
        )

    def take_news(self) -> list[News]:
        """For the scheduler side: what `take_finished_loads` has heard of since the last call."""
        news, self._news = self._news, []
        return news

    def close_plane(self) -> bool:
        """Close the data plane: what was under way fails, and afterwards it touches no memory. False while a copy
        hangs in the device. Another may replace it only once it is closed: a new boot says that the old one ended."""
        ended = self.plane.close()
        self._hear(self.plane)
        return ended

    def _refuse(self, step: PlannedStep) -> None:
        """The step was planned for memory that this rank has since lost: the slots that it names hold other bytes.
        The rank may have restarted in the middle of the planning, so some ops may belong to its new boot."""
        refusals = tuple(_refusal(op.op_id) for op in (*step.loads.ops, *step.stores.ops))
        for boot_id in (step.boots[self.rank] or "", self.plane.boot_id):
            self._take(News(boot_id, refusals))

    def _hear(self, plane: DataPlane) -> None:
        completions = plane.take_completions()
        if completions:
            self._take(News(plane.boot_id, tuple(completions)))

    def _take(self, news: News) -> None:
        self._news.append(news)
        for completion in news.completions:
            if completion.mark != "source_free":
                self._end_load(completion)

    def _end_load(self, completion: Completion) -> None:
        load = self._loading.pop(completion.op_id, None)
        if load is not None:
            (self._failed if completion.mark == "failed" else self._done).append(load)


def _refusal(op_id: int) -> Completion:
    return Completion(op_id, "failed", "this rank has restarted since the op was planned")


class NoDataPlane:
    """Stands for the data plane of a rank that has none, for the reason that it reports. Thread-safe.

    It takes ops, and fails them: vLLM is told of every load.
    """

    def __init__(
        self, rank: int, slot_bytes: int, reason: str | None, error: str | None, sender: ReportSequence | None = None
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self._report = RankReport(
            rank=rank,
            boot_id=self.boot_id,
            state="stopped" if error is None else "failed",
            slot_bytes=slot_bytes,
            pinned_slots=0,
            target_slots=0,
            pinned_bytes=0,
            target_bytes=0,
            error_reason=reason,
            error=error,
            sender="",
            number=0,
        )
        self._newest = NewestDesiredState()
        self._sender = sender or ReportSequence()
        self._lock = threading.Lock()
        self._completions: list[Completion] = []

    def start(self, *, at_ease: bool = False) -> None:
        """There is nothing to pin."""

    def begin_step(self) -> None:
        """Nothing runs beside the step."""

    def launched(self) -> None:
        """Nothing waits for it."""

    def end_step(self) -> None:
        """Nothing waits for it."""

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        failed = [Completion(op.op_id, "failed", "this rank has no data plane") for op in plan.ops]
        with self._lock:
            self._completions += failed

    def drive(self) -> None:
        """Nothing is under way."""

    def take_completions(self) -> list[Completion]:
        with self._lock:
            completions, self._completions = self._completions, []
        return completions

    def report(self) -> RankReport:
        return self._sender.next_report(self._look)

    def _look(self) -> RankReport:
        followed = self._newest.applied
        return replace(
            self._report,
            engine_id=followed.engine_id,
            applied=followed.number,
            stale_desired_states=self._newest.stale,
        )

    def apply(self, desired: DesiredState) -> None:
        """Changes nothing here, but the next data plane begins with it."""
        self._newest.apply_if_newer(desired, lambda _: None)

    @property
    def applied(self) -> DesiredState:
        return self._newest.applied

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Nobody waits for what changes in the report."""

    def close(self, timeout: float = 5.0) -> bool:
        """It holds nothing."""
        return True


class PlaneSource:
    """What the agent reports: the data plane that the worker side has now. Thread-safe: answers come to the agent, or
    with the steps where it reaches no server."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._switching = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def report(self) -> RankReport:
        return self._side.plane.report()

    def apply(self, desired: DesiredState) -> None:
        with self._switching:
            plane = self._side.plane
            plane.apply(desired)
        plane.start()  # whoever is answered has started

    def add_listener(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self._side.plane.add_listener(callback)

    def switch(self, plane: DataPlane) -> None:
        """Replace the data plane: the rank restarts. The present one has ended (`WorkerSide.close_plane`). The new
        one begins with the current desired state, so that no late answer to the old one can mislead it."""
        with self._switching:
            followed = self._side.plane.applied
            if followed.engine_id:
                plane.apply(followed)
            self._side.plane = plane
        for callback in self._callbacks:
            plane.add_listener(callback)
            callback()
