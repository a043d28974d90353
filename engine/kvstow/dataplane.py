"""One rank's data plane: it takes ops, moves their bytes, and reports completions and the state of its pool.

`kvstow.copythread` states what it guarantees and assumes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstow.callbacks import Callbacks
from kvstow.copythread import CopyThread
from kvstow.devices.base import Device, Fence, Launcher, LayerDevice
from kvstow.errors import CopyError
from kvstow.layeredloads import LayeredLoads
from kvstow.memory.slotpool import PoolStatus, SlotPool
from kvstow.messages import (
    Completion,
    CopyFigures,
    DesiredState,
    LayerFigures,
    Op,
    PoolFigures,
    RankReport,
    RankState,
    StagedLoad,
    StepPlan,
    figures_of,
)

logger = logging.getLogger("kvstow.dataplane")

_AT_ONCE = 2
"""Loads that run at a time. More would make the copy of a sampled token wait behind them on the link."""

_STAGED_AT_ONCE = 64
"""Loads that run at a time if there is a launcher. They only fill staging memory until the host launches them, and the
device bounds their bytes."""


class DataPlane:
    """Owns `pool` and `device` and closes both. The host calls `start` when pinning may begin. Thread-safe."""

    def __init__(
        self,
        rank: int,
        pool: SlotPool,
        device: Device,
        *,
        launcher: Launcher | None = None,
        layers: LayerDevice | None = None,
        max_queued: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If this raises, the caller still owns pool and device. `launcher`: that of the device, if it has one; then
        `submit` belongs to the host's thread. `layers`: the same device, if it can load by layer."""
        self.rank = rank
        self.boot_id = secrets.token_hex(8)
        self.pool = pool
        self._listeners = Callbacks()
        self._applying = threading.Lock()
        self.applied = DesiredState("", 0, number=0)
        """The desired state in effect."""
        self._excess: str | None = None
        self._closed = False
        self._device, self._may_drive = device.name, device.copies_alone
        self._launcher = launcher
        pool.add_listener(self._listeners.call)
        # Last: once the thread runs, an error would leave the device with two owners.
        self._copies = CopyThread(
            f"kvstow-copy-{rank}",
            device,
            pool.hold,
            pool.slot_bytes,
            max_queued,
            clock,
            self._listeners.call,
            loads_at_once=_AT_ONCE if launcher is None else _STAGED_AT_ONCE,
        )
        self.layered = None if layers is None else LayeredLoads(layers, self._copies, pool.hold)

    def start(self, *, at_ease: bool = False) -> None:
        """Pin the pool in the background. Idempotent. With `at_ease`, it pins slowly, while the host itself is
        starting, until `start` is called without it."""
        self.pool.start(at_ease=at_ease)

    def begin_step(self) -> None:
        """The host calls this when it begins to launch the work of a step; pinning yields to it. O(1). See
        `HostSteps`."""
        self.pool.steps.begin()

    @property
    def is_pinning(self) -> bool:
        """Whether the pool's memory is changing. If so, the host should pass the work of the step to `launched`."""
        return self.pool.steps.is_pinning

    def launched(self, work: Fence | None = None) -> None:
        """The host calls this when it has launched the work of the step. If `work` stands for it, pinning yields to the
        device until it has finished."""
        self.pool.steps.launched(work)

    def end_step(self) -> None:
        """The host calls this when the step has ended, with or without work for the device."""
        self.pool.steps.end()

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        """Start the ops of `plan` once `after` is reached. Never raises: an op that cannot be taken (queue full, copy
        thread failed or closed), or that is for another boot of this rank, gets a failed completion. Without a
        launcher, it does not block. A launcher launches the work of `plan` in this call, after that of older plans, and
        its device needs no `after`."""
        if self._launcher is None:
            self._copies.submit([op for op in plan.ops if self._has_memory_of(op)], after)
            return
        self._launcher.write(plan.launches)
        for op in plan.ops:
            if self._has_memory_of(op):
                self._launch(self._launcher, op)
            elif op.direction == "store":
                with suppress(CopyError):  # other ranks launch it, so this one must, too; its failure is reported
                    self._launcher.gather(op.blocks)
                    self._launcher.launch_rest()

    def _has_memory_of(self, op: Op) -> bool:
        """Whether the op's slots are in the memory of this boot. If not, the op fails, because the slots of another
        boot held other bytes."""
        if op.boots and op.boots[self.rank] != self.boot_id:
            self._copies.fail(op, CopyError("this rank has restarted since the op began"))
            return False
        return True

    def take_staged(self) -> list[StagedLoad]:
        """The loads that have staged pieces since the last call, if there is a launcher."""
        return [] if self._launcher is None else self._launcher.take_staged()

    def drive(self) -> None:
        """Advance the copies on the caller's thread, if the device needs no CPU to copy. A host whose thread keeps the
        interpreter busy may call it; others need not. Waits for the copy thread for 1 ms at most. Raises only
        exceptions of signal handlers."""
        if self._may_drive:
            self._copies.drive()

    def _launch(self, launcher: Launcher, op: Op) -> None:
        try:
            is_store = op.direction == "store"
            fence = launcher.gather(op.blocks) if is_store else launcher.expect(op.op_id, len(op.blocks))
        except Exception as error:  # noqa: BLE001 - the failure of one op; the others and the host's step continue
            self._copies.fail(op, error)
            return
        self._copies.submit((op,), fence)
        del fence  # or an op that was not taken would keep the memory of its gathers
        launcher.launch_rest()  # meanwhile the copy thread copies what is gathered

    def take_completions(self) -> list[Completion]:
        """All completions since the last call, as one atomic snapshot; also after `close`."""
        return self._copies.take_completions()

    def wait_completions(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if there are completions to take."""
        return self._copies.wait_completions(timeout)

    @property
    def pending_ops(self) -> int:
        """Ops that were submitted and are not complete. If there are none, nothing reads or writes the pool."""
        return self._copies.statistics().pending_ops

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on any thread, after the report has changed for a reason other than traffic. It must not
        block or close the data plane."""
        self._listeners.register(callback)

    def apply(self, desired: DesiredState) -> None:
        """Apply `desired` to the pool, unless this or a newer one of its engine is applied already. A capacity above
        the pool's `max_slots` is met as far as possible, and the report says so."""
        with self._applying:
            if not desired.replaces(self.applied):
                return
            self._apply(desired)
            self.applied = desired  # last, so that no report counts slots which this state has given up
        self._listeners.call()

    def _apply(self, desired: DesiredState) -> None:
        before = self.applied
        wanted, most = desired.capacity_slots, self.pool.max_slots
        excess = f"the capacity is {wanted} slots; max_bytes of this rank's pool allows {most}"
        self._excess = excess if wanted > most else None
        self.pool.set_target(min(wanted, most))
        self.pool.set_paused(desired.paused)
        if desired.engine_id != before.engine_id or desired.pin_attempt > before.pin_attempt:
            self.pool.retry()

    def report(self) -> RankReport:
        """The current state, without a number: the sender of the report adds it."""
        applied = self.applied  # read before the slots are counted: a newer one may arrive meanwhile
        pool, copies, failure = self.pool.status(), self._copies.statistics(), self._copies.failure
        reason, error = self._trouble(pool, failure)
        return RankReport(
            rank=self.rank,
            boot_id=self.boot_id,
            state=self._state(pool, failure),
            slot_bytes=self.pool.slot_bytes,
            **figures_of(PoolFigures, pool),
            **figures_of(CopyFigures, copies),
            **figures_of(LayerFigures, LayerFigures() if self.layered is None else self.layered.figures),
            error_reason=reason,
            error=error,
            numa_bytes={str(node): num_bytes for node, num_bytes in pool.numa_bytes.items()},
            engine_id=applied.engine_id,
            applied=applied.number,
            device=self._device,
        )

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more ops, let running ones finish for `timeout` seconds, fail the others, and close device and pool.
        Idempotent. Returns False if a copy hangs in the device. Then the op is not complete, and the memory stays
        mapped, because unmapping it would crash the process."""
        self._closed = True
        if self._launcher is not None:
            self._launcher.stop()
        ended = self._copies.close(timeout)
        if ended:
            self.pool.close()
        else:
            logger.error("rank %d: a copy hangs in the device; its pool is not freed", self.rank)
        self._listeners.call()
        return ended

    def _state(self, pool: PoolStatus, failure: str | None) -> RankState:
        if self._closed:
            return "stopped"
        if failure is not None:
            return "failed"
        if pool.error is not None or self._excess is not None:
            return "degraded"
        if pool.state == "ready":
            return "ready"
        return "pinning" if pool.pinned_slots else "starting"

    def _trouble(self, pool: PoolStatus, failure: str | None) -> tuple[str | None, str | None]:
        """The reason and the text of the worst failure, or None for both."""
        if failure is not None:
            return "copy_thread", failure
        if pool.error is not None:
            return pool.error_reason, pool.error
        return ("max_bytes", self._excess) if self._excess is not None else (None, None)
