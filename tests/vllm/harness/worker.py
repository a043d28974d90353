"""A data plane in lock step with the run: its copy thread is real, and the run waits for it at every step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tests.vllm.harness.device import SimulatedDevice

from kvstow.dataplane import DataPlane
from kvstow.devices.base import Device, Fence, LayeredLoad
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Completion, Mark, Op, StepPlan

_TIMEOUT = 10.0


class SteppedWorker(DataPlane):
    """Completions come to the host in the order in which the device made them, however the threads ran."""

    def __init__(self, rank: int, pool: HostPool, device: Device, **rest: object) -> None:
        assert isinstance(device, SimulatedDevice)
        super().__init__(rank, pool, device, **rest)  # type: ignore[arg-type]
        self.device = device
        self._arrived: dict[tuple[int, Mark], Completion] = {}
        self._ready: list[Completion] = []
        if self.layered is not None:
            self._load, self.layered.load = self.layered.load, self._load_by_layer  # type: ignore[method-assign]

    def _load_by_layer(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None:
        self.device.next_layered = [op.op_id for op in ops]
        return self._load(ops, after)

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        super().submit(plan, after)
        if self.report().state == "failed":
            self._take_the_rest()
        elif plan.ops:
            op_ids = [op.op_id for op in plan.ops if op.slots]
            self.device.wait_begun(set(op_ids))
            self.device.schedule(op_ids)
            self._await([(op.op_id, "done") for op in plan.ops if not op.slots])  # given up before they began

    def take_completions(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def close(self, timeout: float = 0.0) -> bool:
        """Fail what has not ended: the device no longer ticks."""
        ended = super().close(0.0)
        self._take_the_rest()
        return ended

    def kill_copy_thread(self) -> None:
        """Let a defect end it, if it has anything to do."""
        if not self.report().pending_ops:
            return
        self.device.is_broken = True
        _wait(lambda: self.report().state == "failed" and not self.report().pending_ops, "the copy thread lives on")
        self._take_the_rest()

    def _take_the_rest(self) -> None:
        self._ready += sorted(super().take_completions(), key=lambda each: each.op_id)

    def advance(self) -> None:
        """Let a tick of the device pass, and see its completions through the copy thread."""
        self._await(self.device.tick())

    def _await(self, moved: Sequence[tuple[int, Mark]]) -> None:
        for what in moved:
            while what not in self._arrived:
                if not self.wait_completions(_TIMEOUT):
                    raise TimeoutError(f"op {what[0]} did not become {what[1]}")
                self._arrived |= {(each.op_id, each.mark): each for each in super().take_completions()}
            self._ready.append(self._arrived.pop(what))

    def wait_pinned(self) -> None:
        """Wait until the pool is as it was last told to be."""
        _wait(lambda: self.pool.status().state == "ready", "the pool is not pinned")


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        threading.Event().wait(0.0002)
