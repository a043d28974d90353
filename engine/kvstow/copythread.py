"""The thread that drives a device: it starts ops, polls their tickets and collects their completions.

Guarantees
- `submit` never blocks, and each submitted op ends in exactly one `done` or `failed` completion.
- `failed` means that the device no longer reads or writes the op's blocks and slots.
- The memory of an op's slots is held from before the device uses it until the op is complete.
- If the thread ends, its ops fail, and ops submitted later fail immediately. `failure` says why if an error ended it,
  and is None after `close`.

Assumes
- The control plane does not reuse a slot before the op on it is complete. So ops may overtake one another, and a
  store whose fence is not reached delays no load.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from kvstow.devices.base import Device, Fence, Ticket, TicketState
from kvstow.errors import CopyError, DataPlaneFailedError, QueueFullError
from kvstow.messages import Completion, CopyFigures, Direction, Op

logger = logging.getLogger("kvstow.dataplane")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 0.2e-3
"""Seconds between two polls of fences and tickets. A staging buffer of 32 MiB is on the link for 0.6 ms: polling every
1 ms cost a fifth of the rate (43 of 54 GB/s); every 0.2 ms costs almost nothing, and 5 ms of CPU per 2 GiB."""

_DRIVEN_PAUSE, _DRIVEN_FOR = 1e-3, 0.1
"""Seconds between two polls while the host drives the copies, and for how many seconds after its last call it counts as
driving them. Each poll takes the interpreter from the host: a thread of small torch ops lost a quarter of its speed to
polls every 0.2 ms, and 4 % to polls every 1 ms."""

_STORES_AT_ONCE = 2
"""Stores that run at a time. More would make the copy of a sampled token wait behind them on the link."""

_TURN_TIMEOUT = 1e-3
"""Seconds that `drive` waits for the copy thread to finish its turn."""

_STUCK_GRACE = 5.0
"""Seconds that one copy may outlast the timeout of `close`."""


@dataclass(slots=True)
class PendingOp:
    """An op that is not complete. It may begin once `after` is reached. `submitted`: when it was queued; `ticket` is
    None until the device has the op."""

    op: Op
    after: Fence | None
    submitted: float
    hold: ExitStack | None = None
    ticket: Ticket | None = None
    queue_seconds: float = 0.0
    source_free: bool = False

    def drop_memory(self) -> None:
        """Release the memory of the op's slots, which the device no longer accesses."""
        if self.hold is not None:
            self.hold.close()


class OpQueues:
    """Ops by direction, first in, first out. At most two stores and `loads_at_once` loads run at a time; `adopted` ops
    do not count.

    Loads come before stores, because a request waits for a load, and nothing waits for a store. Not locked: the copy
    thread's lock guards it.
    """

    def __init__(self, max_queued: int, loads_at_once: int) -> None:
        self._max_queued = max_queued
        self._at_once: dict[Direction, int] = {"load": loads_at_once, "store": _STORES_AT_ONCE}
        self._queued: dict[Direction, deque[PendingOp]] = {"load": deque(), "store": deque()}
        self.adopted: list[PendingOp] = []
        """Ops that the host has started on the device."""
        self._running: dict[Direction, list[PendingOp]] = {"load": [], "store": []}

    def put(self, op: Op, after: Fence | None, now: float) -> None:
        """Queue an op. Raises `QueueFullError`."""
        if self.num_queued() >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} ops are queued; no more are taken")
        self._queued[op.direction].append(PendingOp(op, after, now))

    def admit(self) -> None:
        """Let queued ops run where there is room."""
        for direction, queue in self._queued.items():
            while self._has_room(direction):
                self._running[direction].append(queue[0])  # first: it may raise, and no op may get lost
                queue.popleft()

    def running(self) -> list[PendingOp]:
        """Adopted ops, then loads, then stores, each in order of their start."""
        return [*self.adopted, *self._running["load"], *self._running["store"]]

    def discard_running(self, running: PendingOp) -> None:
        of = self.adopted if running in self.adopted else self._running[running.op.direction]
        of.remove(running)

    def take_queued(self) -> list[PendingOp]:
        """Remove all queued ops, and return them."""
        taken = [*self._queued["load"], *self._queued["store"]]
        for queue in self._queued.values():
            queue.clear()
        return taken

    def can_start(self) -> bool:
        """Whether a queued op has room to run."""
        return any(self._has_room(direction) for direction in self._queued)

    def num_queued(self, direction: Direction | None = None) -> int:
        """The number of queued ops of one direction, or of both."""
        return sum(map(len, self._queued.values())) if direction is None else len(self._queued[direction])

    def num_running(self) -> int:
        return len(self.adopted) + sum(map(len, self._running.values()))

    def _has_room(self, direction: Direction) -> bool:
        return bool(self._queued[direction]) and len(self._running[direction]) < self._at_once[direction]


class CopyThread:
    """Owns `device` and closes it. `hold` keeps the memory of the slots below a number in place (`SlotPool.hold`).
    `on_failure` is called on this thread after it has failed.

    Thread-safe. `_turn` is taken before `_lock`. Only the thread that holds `_turn` calls the device, sets `_defect`
    and removes running ops. That is this thread, or a thread that calls `drive`. It needs no `_lock` to call the
    device, to set `_defect`, or to copy the lists of running ops. `_lock` guards all other uses of the fields, except
    for `_driven_at`.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        hold: Callable[[int], ExitStack],
        slot_bytes: int,
        max_queued: int,
        clock: Callable[[], float],
        on_failure: Callable[[], None],
        *,
        loads_at_once: int = 2,
    ) -> None:
        self._device, self._hold = device, hold
        self._slot_bytes = slot_bytes
        self._clock, self._on_failure = clock, on_failure
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._completed = threading.Condition(self._lock)
        self._ops = OpQueues(max_queued, loads_at_once)
        self._completions: list[Completion] = []
        self._statistics = CopyFigures()
        self._failure: str | None = None
        self._defect: BaseException | None = None
        self._stop_at: float | None = None
        self._has_ended = False
        self._driven_at = -_DRIVEN_FOR  # a single number, so it needs no lock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the thread has failed, or None."""
        with self._lock:
            return self._failure

    def submit(self, ops: Sequence[Op], after: Fence | None) -> None:
        with self._lock:
            now = self._clock()
            self._publish([completion for op in ops if (completion := self._take(op, after, now))])
            self._work.notify()

    def adopt(self, op: Op, ticket: Ticket, hold: ExitStack) -> None:
        """Follow an op that the caller has started on the device, and close `hold` when it is complete."""
        copy = PendingOp(op, None, self._clock(), hold, ticket)
        with self._lock:
            if self._has_ended:
                self._publish([_failed(op, DataPlaneFailedError(self._failure or "the data plane is closed"))])
                copy.drop_memory()
            else:
                self._ops.adopted.append(copy)
                self._work.notify()

    def failed_of(self, ops: Sequence[Op]) -> list[Op] | None:
        """The ops among `ops` that have failed; None while some of `ops` are not complete. The caller has not taken
        their completions yet."""
        with self._lock:
            marks = {one.op_id: one.mark for one in self._completions if one.mark != "source_free"}
        return [op for op in ops if marks[op.op_id] == "failed"] if all(op.op_id in marks for op in ops) else None

    def fail(self, op: Op, error: BaseException) -> None:
        """Report an op that never began as failed."""
        with self._lock:
            self._publish([_failed(op, error)])

    def drive(self) -> None:
        """Do the copy thread's next turn on the caller's thread. This helps a host that computes in Python: after each
        driver call, the copy thread waits up to 5 ms for the interpreter, in which time the link moves 256 MiB. If the
        copy thread has the turn, the caller waits briefly, which gives that thread the interpreter."""
        self._driven_at = self._clock()
        if not self._turn.acquire(timeout=_TURN_TIMEOUT):
            return
        try:
            with self._lock:
                idle = self._stop_at is not None or not (self._ops.num_queued() or self._ops.num_running())
            if not idle:
                with suppress(Exception):  # the error ends the copy thread, which reports it
                    self._take_turn()
        finally:
            self._turn.release()
            with self._lock:
                if self._defect is not None:
                    self._work.notify()

    def take_completions(self) -> list[Completion]:
        with self._lock:
            taken, self._completions = self._completions, []
            return taken

    def wait_completions(self, timeout: float) -> bool:
        with self._lock:
            return self._completed.wait_for(lambda: bool(self._completions), timeout)

    def statistics(self) -> CopyFigures:
        with self._lock:
            return replace(
                self._statistics,
                pending_ops=self._ops.num_queued() + self._ops.num_running(),
                uncollected_completions=len(self._completions),
                queued_stores=self._ops.num_queued("store"),
                queued_loads=self._ops.num_queued("load"),
            )

    def close(self, timeout: float) -> bool:
        """Fail the queued ops, give running ones `timeout` seconds, and close the device. Returns False if a copy is
        still running after a further grace period. Then the device stays open, and its memory must not move."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = self._clock() + timeout
                self._fail_queued("the data plane was closed before the op began")
                self._work.notify()
        self._thread.join(timeout + _STUCK_GRACE)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            pause = 0.0
            while self._wait_for_work(pause):
                with self._turn:
                    moved = self._take_turn()
                longest = _DRIVEN_PAUSE if self._clock() < self._driven_at + _DRIVEN_FOR else _LONGEST_PAUSE
                pause = 0.0 if moved else min(max(2 * pause, _SHORTEST_PAUSE), longest)
        except BaseException as error:
            logger.exception("the copy thread has failed")
            with self._lock:
                self._failure = f"the copy thread has failed: {error!r}"
                self._stop_at = self._clock() if self._stop_at is None else self._stop_at
                self._defect = None  # its traceback keeps the ops and their fences alive
        self._end()

    def _wait_for_work(self, pause: float) -> bool:
        """Wait until an op can start, but only for `pause` seconds while ops run, because their fences and tickets must
        be polled. Returns False when it is time to end."""
        with self._lock:
            if not self._ops.num_running():
                self._work.wait_for(self._has_work)
                pause = 0.0
            if (running := self._ops.num_running()) == len(self._ops.adopted) > 0 and not self._ops.num_queued():
                pause = _DRIVEN_PAUSE  # the computation waits for them on the device, and no thread does
            if running:
                self._work.wait_for(self._ops.can_start, timeout=pause)
            if self._defect is not None:
                raise self._defect
            return self._stop_at is None or (self._ops.num_running() > 0 and self._clock() < self._stop_at)

    def _take_turn(self) -> bool:
        """Begin ops that have room, advance the device, and poll each running op. Returns True if one of them has made
        progress. After an error the state of the device is unknown, and only `_end` may follow."""
        if self._defect is not None:
            raise self._defect
        try:
            with self._lock:
                self._ops.admit()
            moved = self._publish_each(self._begin)
            self._device.advance()
            return self._publish_each(self._poll) or moved
        except BaseException as error:
            self._defect = error
            raise

    def _publish_each(self, step: Callable[[PendingOp], Completion | None]) -> bool:
        """Publish the completions that `step` returns for running ops; True if there were any."""
        published = False
        for copy in self._ops.running():
            completion = step(copy)
            if completion is not None:
                published = True
                self._complete(copy, completion)
        return published

    def _begin(self, copy: PendingOp) -> Completion | None:
        if copy.ticket is None:
            op, after = copy.op, copy.after
            if not op.slots:  # the op was given up before it began
                return Completion(op.op_id, "done")
            copy.queue_seconds = self._clock() - copy.submitted
            try:
                copy.hold = self._hold(max(op.slots, default=-1) + 1)
                launch = self._device.launch_store if op.direction == "store" else self._device.launch_load
                copy.ticket = launch(op.op_id, op.blocks, op.slots, after)
            except Exception as error:  # noqa: BLE001 - the failure of one op, reported by its completion
                return _failed(op, error)
        return None

    def _poll(self, copy: PendingOp) -> Completion | None:
        """The completion that is not published yet, if there is one."""
        assert copy.ticket is not None
        state = copy.ticket.poll()
        if state is TicketState.DONE:
            num_bytes = len(copy.op.slots) * self._slot_bytes
            return Completion(copy.op.op_id, "done", None, num_bytes, copy.ticket.seconds, copy.queue_seconds)
        if state is TicketState.FAILED:
            return _failed(copy.op, copy.ticket.error or CopyError("the device gave no reason"))
        if state is TicketState.SOURCE_FREE and not copy.source_free:
            copy.source_free = True
            return Completion(copy.op.op_id, "source_free")
        return None

    def _complete(self, copy: PendingOp, completion: Completion) -> None:
        """Publish a completion, and forget the op if that is final. The order matters: if a step raises, the op is
        still reported once, now or when the thread ends."""
        with self._lock:
            if completion.mark == "done":
                self._statistics = _counted(self._statistics, copy.op.direction, completion)
            self._publish([completion])
            if completion.mark != "source_free":
                self._ops.discard_running(copy)
                copy.drop_memory()

    def _end(self) -> None:
        """Close the device before its ops fail, because until then it may still access their memory."""
        with self._lock:
            self._stop_at = self._clock() if self._stop_at is None else self._stop_at
            reason = self._failure or "the data plane was closed while the op ran"
            self._fail_queued(reason)
        try:
            with self._turn:
                self._device.close()
        except Exception:
            logger.exception("the device did not close")
        with self._lock:
            for copy in self._ops.running():
                self._publish([_failed(copy.op, DataPlaneFailedError(reason))])
                self._ops.discard_running(copy)
                copy.drop_memory()
            self._has_ended = True
        if self._failure is not None:
            self._on_failure()

    # Under `_lock`.

    def _has_work(self) -> bool:
        is_ending = self._stop_at is not None or self._defect is not None
        return is_ending or self._ops.can_start() or self._ops.num_running() > 0

    def _take(self, op: Op, after: Fence | None, now: float) -> Completion | None:
        """Queue the op, or return its failure."""
        if self._stop_at is not None:
            return _failed(op, DataPlaneFailedError(self._failure or "the data plane is closed"))
        try:
            self._ops.put(op, after, now)
        except Exception as error:  # noqa: BLE001 - the failure of one op; the others and the host's step continue
            return _failed(op, error)
        return None

    def _publish(self, completions: Sequence[Completion]) -> None:
        if completions:
            self._completions.extend(completions)
            self._completed.notify_all()

    def _fail_queued(self, reason: str) -> None:
        self._publish([_failed(queued.op, DataPlaneFailedError(reason)) for queued in self._ops.take_queued()])


def _failed(op: Op, error: BaseException) -> Completion:
    return Completion(op.op_id, "failed", f"{type(error).__name__}: {error}")


def _counted(statistics: CopyFigures, direction: Direction, done: Completion) -> CopyFigures:
    totals = {f"{direction}_bytes_total": done.num_bytes, f"{direction}_busy_seconds": done.seconds}
    return replace(statistics, **{name: getattr(statistics, name) + value for name, value in totals.items()})
