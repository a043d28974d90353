"""A rank without memory: everything is pinned from the start and every op is done at once."""

from __future__ import annotations

import secrets

from kvstow.devices.base import Fence
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, RankReport, StepPlan


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
