"""What drives a rank's copies, and its replacement while nothing can."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvstow.devices.base import Fence, LayeredLoad
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, Op, RankReport, RankState, StepPlan


class StepLoads(Protocol):
    """`LayeredLoads`, or those of an attached rank."""

    @property
    def num_parts(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    def load(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None: ...


class RankDataPlane(Protocol):
    """What a `WorkerSide` needs: a `DataPlane`, vLLM's `AttachedPlane` or a `NoDataPlane`."""

    @property
    def boot_id(self) -> str: ...
    @property
    def is_pinning(self) -> bool: ...
    @property
    def applied(self) -> DesiredState: ...
    @property
    def layered(self) -> StepLoads | None: ...
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


class NoDataPlane:
    """Replaces the data plane of a rank that has none: before it has one, while vLLM sleeps, or after an error.

    It fails every op, so that each load ends for vLLM. Used like a `DataPlane`.
    """

    is_pinning = False
    layered: StepLoads | None = None

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
        """Does nothing: there is nothing to pin."""

    def begin_step(self) -> None:
        """Does nothing: there is nothing to pin, and no copy is under way."""

    def launched(self, work: Fence | None = None) -> None:
        """Does nothing: see `begin_step`."""

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
        """Remember the desired state: the next data plane begins with it."""
        self._newest.apply_if_newer(desired, lambda _: None)

    @property
    def applied(self) -> DesiredState:
        return self._newest.applied

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Does nothing: the report never changes."""

    def close(self, timeout: float = 5.0) -> bool:
        """Does nothing: it holds no memory."""
        return True
