"""The gate through which a rank's ops pass: those of its session, and no others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstow.attach.hello import GateHold, number_of
from kvstow.errors import LoadRefusedError
from kvstow.messages import Completion, Op, StepPlan

if TYPE_CHECKING:
    from kvstow.dataplane import DataPlane
    from kvstow.devices.base import Fence, LayeredLoad

_REFUSED = "the session of this op has ended"
"""The error of an op that the gate does not let through."""


class OpGate:
    """Lets ops of one session through, and fails all others, because their slots may lie in other memory by now, or
    hold other bytes. It also starts loads by layer, as the `layered` of a data plane does.

    Once the gate is shut and `is_quiet`, no op of the session is under way on this rank, and none will be. A `GateHold`
    for the present session keeps the gate open after the session's end. A hold has no effect on a gate that is shut, or
    open for another session, and `hold` then stays 0.

    Thread-safe. Its lock is never held for long.
    """

    def __init__(self, plane: DataPlane, *, stores: bool) -> None:
        """`stores` is False if another rank stores the same bytes for this one."""
        self._plane, self._stores = plane, stores
        self._lock = threading.Lock()
        self._number = 0
        """The number of the session whose ops are let through. 0 while the gate is shut."""
        self._starting = 0
        """How many calls of `load` are starting loads."""
        self.hold = 0
        """The number of the `GateHold` that keeps the gate open, or 0."""
        self._refused: list[Completion] = []

    def open(self, number: int) -> None:
        """Let ops of the session with this number through."""
        with self._lock:
            self._number, self.hold = number, 0

    def shut(self) -> None:
        """Let no ops through."""
        self.open(0)

    def keep_open(self, hold: GateHold) -> None:
        """Replace the present hold by this one. `NO_HOLD` withdraws it."""
        with self._lock:
            self.hold = hold.number if hold.session == self._number else 0

    def shut_unless_held(self) -> bool:
        """Shut the gate if no hold keeps it open. Returns whether it is shut."""
        with self._lock:
            if not self.hold:
                self._number = 0
            return not self._number

    def is_quiet(self) -> bool:
        """Whether no op is under way."""
        with self._lock:
            return not self._starting and self._plane.pending_ops == 0

    def submit(self, plan: StepPlan, after: Fence | None) -> None:
        """Submit the ops that the gate lets through, and fail the others. Never blocks or raises: see
        `DataPlane.submit`."""
        own_ops = [op for op in plan.ops if self._stores or op.direction == "load"]
        with self._lock:
            ops = tuple([op for op in own_ops if number_of(op.op_id) == self._number])
            self._refused += [Completion(op.op_id, "failed", _REFUSED) for op in own_ops if op not in ops]
            if ops:  # under the lock, because no op may enter after `shut`
                self._plane.submit(StepPlan(ops), after)

    def load(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None:
        """Start loads that a computation waits for. If the gate does not let all of them through, all of them fail, and
        this raises `LoadRefusedError`.

        Starting takes long if the loads do not go layer by layer. So the lock is not held meanwhile, but the gate is
        not quiet until they have started.
        """
        assert self._plane.layered is not None
        with self._lock:
            if any(number_of(op.op_id) != self._number for op in ops):
                self._refused += [Completion(op.op_id, "failed", _REFUSED) for op in ops]
                raise LoadRefusedError(_REFUSED)
            self._starting += 1
        try:
            return self._plane.layered.load(ops, after)
        finally:
            with self._lock:
                self._starting -= 1

    @property
    def num_parts(self) -> int:
        return 0 if self._plane.layered is None else self._plane.layered.num_parts

    @property
    def failure(self) -> str | None:
        return None if self._plane.layered is None else self._plane.layered.failure

    def take_completions(self) -> list[Completion]:
        with self._lock:
            refused, self._refused = self._refused, []
        return refused + self._plane.take_completions()
