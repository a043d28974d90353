"""One rank's data plane: it takes ops, moves their bytes, says what became of them and how the pool is.

What it guarantees of ops and of its copy thread, and what it assumes, stands in `kvstow.copythread`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from kvstow.callbacks import Callbacks
from kvstow.copythread import CopyThread
from kvstow.devices.base import Device, Fence
from kvstow.memory.pool import HostPool
from kvstow.memory.status import PoolStatus
from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import Completion, DesiredState, RankReport, RankState, StepPlan

logger = logging.getLogger("kvstow.dataplane")


class DataPlane:
    """Owns `pool` and `device` and closes both. The host calls `start` when pinning may begin.

    Thread-safe.
    """

    def __init__(
        self,
        rank: int,
        pool: HostPool,
        device: Device,
        *,
        sender: ReportSequence | None = None,
        max_queued: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If this raises, the caller still owns pool and device. `sender`: that of the boot before in this process."""
        self.rank = rank
        self.boot_id = secrets.token_hex(8)
        self.pool = pool
        self._listeners = Callbacks()
        self._newest = NewestDesiredState()
        self._sender = sender or ReportSequence()
        self._excess: str | None = None
        self._closed = False
        name = f"kvstow-copy-{rank}"
        self._may_drive = device.capabilities.copies_alone
        pool.add_listener(self._listeners.call)
        # Last: once the thread runs, an error would leave the device with two owners.
        self._copies = CopyThread(name, device, pool.hold, pool.slot_bytes, max_queued, clock, self._listeners.call)

    def start(self, *, at_ease: bool = False) -> None:
        """Pin the pool, in the background; idempotent. `at_ease`: take longer about it, until called without, as a host
        does that is starting up itself."""
        self.pool.start(at_ease=at_ease)

    def begin_step(self) -> None:
        """The host begins to give its device the work of a step: pinning yields to it. O(1); see `HostSteps`."""
        self.pool.steps.begin()

    def launched(self) -> None:
        """The step's work has been given to the device."""
        self.pool.steps.launched()

    def end_step(self) -> None:
        """The host has ended a step, with or without work for its device."""
        self.pool.steps.end()

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        """Start the ops of `plan` once `after` is reached. Never blocks, never raises: an op that cannot be taken
        (queue full, worker failed or closed) comes back as a failed completion."""
        self._copies.submit(plan.ops, after)

    def drive(self) -> None:
        """Advance the copies on the caller's thread, if the device copies by itself: for hosts whose thread keeps the
        interpreter busy. Optional. Waits at most 1 ms, for the copy thread. Never raises, except what interrupts the
        caller anyway: a signal handler's exception."""
        if self._may_drive:
            self._copies.drive()

    def take_completions(self) -> list[Completion]:
        """All completions since the last call, in one atomic snapshot; also after `close`."""
        return self._copies.take_completions()

    def wait_completions(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True when there are completions to take."""
        return self._copies.wait_completions(timeout)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on any thread, after the report has changed otherwise than by traffic. It must neither
        block nor close the worker."""
        self._listeners.register(callback)

    def apply(self, desired: DesiredState) -> None:
        """Make the pool follow `desired`, unless it already follows this or a newer one. A capacity above the pool's
        `max_slots` is met as far as possible, and the report says so."""
        if self._newest.apply_if_newer(desired, self._put_into_effect):
            self._listeners.call()

    @property
    def applied(self) -> DesiredState:
        """The desired state that is in effect."""
        return self._newest.applied

    def _put_into_effect(self, desired: DesiredState) -> None:
        before = self._newest.applied
        wanted, most = desired.capacity_slots, self.pool.max_slots
        excess = f"the capacity is {wanted} slots; max_bytes of this rank's pool allows {most}"
        self._excess = excess if wanted > most else None
        self.pool.set_target(min(wanted, most))
        self.pool.set_paused(desired.paused)
        if desired.engine_id != before.engine_id or desired.pin_attempt > before.pin_attempt:
            self.pool.retry()

    def report(self) -> RankReport:
        """The current state. Reports are numbered in the order in which they are made, whichever path they take."""
        return self._sender.next_report(self._look)

    def _look(self) -> RankReport:
        applied = self._newest.applied  # before the slots are counted: a newer one may arrive meanwhile
        pool, copies, failure = self.pool.status(), self._copies.statistics(), self._copies.failure
        reason, error = self._trouble(pool, failure)
        return RankReport(
            rank=self.rank,
            boot_id=self.boot_id,
            state=self._state(pool, failure),
            slot_bytes=self.pool.slot_bytes,
            pinned_slots=pool.pinned_slots,
            target_slots=pool.target_slots,
            pinned_bytes=pool.pinned_bytes,
            target_bytes=pool.target_bytes,
            pin_rate_bytes_per_second=pool.pin_rate_bytes_per_second,
            pin_elapsed_seconds=pool.pin_elapsed_seconds,
            pin_mode=pool.pin_mode,
            locked_bytes=pool.locked_bytes,
            resident_bytes=pool.resident_bytes,
            chunks_done=pool.chunks_done,
            chunks_total=pool.chunks_total,
            chunks_failed=pool.chunks_failed,
            error_reason=reason,
            error=error,
            notice=pool.notice,
            pending_ops=copies.pending_ops,
            queued_stores=copies.queued_stores,
            queued_loads=copies.queued_loads,
            uncollected_completions=copies.uncollected,
            store_bytes_total=copies.store_bytes,
            load_bytes_total=copies.load_bytes,
            store_busy_seconds=copies.store_seconds,
            load_busy_seconds=copies.load_seconds,
            pin_failures=pool.pin_failures,
            numa_bytes={str(node): num_bytes for node, num_bytes in pool.numa_bytes.items()},
            engine_id=applied.engine_id,
            applied=applied.number,
            stale_desired_states=self._newest.stale,
            sender="",
            number=0,
        )

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more ops, let running ones finish for `timeout` seconds, fail the rest, close device and pool.
        Idempotent. False while a copy hangs in the device: its memory is left as it is, as taking it away would crash,
        and its op is not complete."""
        self._closed = True
        ended = self._copies.close(timeout)
        if ended:
            self.pool.close()
        else:
            logger.error("rank %d: a copy hangs in the device; its pool is not given back", self.rank)
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
        """Reason and text of the worst that has happened."""
        if failure is not None:
            return "copy_thread", failure
        if pool.error is not None:
            return pool.error_reason, pool.error
        return ("max_bytes", self._excess) if self._excess is not None else (None, None)
