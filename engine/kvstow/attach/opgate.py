"""The gate in front of a rank's data plane: it lets through the ops of one session only."""

from __future__ import annotations

import threading

from kvstow.attach.rank import Fence, RankPlane
from kvstow.attach.ticket import number_of
from kvstow.messages import Completion, StepPlan

_REFUSED = "the session of this op has ended"


class OpGate:
    """Fails ops of other sessions: their slots may lie in other memory by now, or hold other bytes. Thread-safe.

    Once the gate is shut and `is_quiet`, no op of the session is under way on this rank, and none will be.
    """

    def __init__(self, plane: RankPlane, *, stores: bool) -> None:
        """`stores` is False if another rank stores the same bytes for this one."""
        self._plane = plane
        self._stores = stores
        self._lock = threading.Lock()
        self._number = 0
        self._refused: list[Completion] = []

    def open(self, number: int) -> None:
        """Let ops of the session with this number through."""
        with self._lock:
            self._number = number

    def shut(self) -> None:
        with self._lock:
            self._number = 0

    def is_quiet(self) -> bool:
        return self._plane.pending_ops == 0

    def submit(self, plan: StepPlan, after: Fence | None) -> None:
        """Never blocks or raises: see `DataPlane.submit`."""
        wanted = [op for op in plan.ops if self._stores or op.direction == "load"]
        with self._lock:
            ops = tuple([op for op in wanted if number_of(op.op_id) == self._number])
            self._refused += [Completion(op.op_id, "failed", _REFUSED) for op in wanted if op not in ops]
            if ops:  # under the lock: no op may enter after `shut`
                self._plane.submit(StepPlan(ops), after)

    def take_completions(self) -> list[Completion]:
        with self._lock:
            refused, self._refused = self._refused, []
        return refused + self._plane.take_completions()
