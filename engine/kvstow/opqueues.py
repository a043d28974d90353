"""The ops of a rank that are not complete: queued ones, and those that run on the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstow.devices.base import Fence, Ticket
from kvstow.errors import QueueFullError
from kvstow.memory.slotpool import SlotHold
from kvstow.messages import Direction, Op

_STORES_AT_ONCE = 2  # more would make a sampled token's copy wait behind them on the link


@dataclass(slots=True)
class PendingOp:
    """An op that is not complete. It may begin once `after` is reached. `submitted`: when it was queued; `ticket` is
    None until the device has the op."""

    op: Op
    after: Fence | None
    submitted: float
    hold: SlotHold | None = None
    ticket: Ticket | None = None
    queue_seconds: float = 0.0
    source_free: bool = False

    def drop_memory(self) -> None:
        """Release the memory of the op's slots, which the device no longer accesses."""
        if self.hold is not None:
            self.hold.release()


class OpQueues:
    """Ops by direction, first in, first out. At most two stores and `loads_at_once` loads run at a time.

    Loads come before stores: a request waits for a load, and nothing waits for a store. Not locked: the copy thread's
    lock guards it.
    """

    def __init__(self, max_queued: int, loads_at_once: int) -> None:
        self._max_queued = max_queued
        self._at_once: dict[Direction, int] = {"load": loads_at_once, "store": _STORES_AT_ONCE}
        self._queued: dict[Direction, deque[PendingOp]] = {"load": deque(), "store": deque()}
        self._running: dict[Direction, list[PendingOp]] = {"load": [], "store": []}
        self._adopted: list[PendingOp] = []

    def put(self, op: Op, after: Fence | None, now: float) -> None:
        """Raises `QueueFullError`."""
        if self.num_queued() >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} ops are queued; no more are taken")
        self._queued[op.direction].append(PendingOp(op, after, now))

    def admit(self) -> None:
        """Let queued ops run where there is room."""
        for direction, queue in self._queued.items():
            while self._has_room(direction):
                self._running[direction].append(queue[0])  # first: it may raise, and no op may get lost
                queue.popleft()

    def adopt(self, running: PendingOp) -> None:
        """Count an op that runs already, whatever room there is."""
        self._adopted.append(running)

    def running(self) -> list[PendingOp]:
        """Adopted ops, then loads, then stores, each in order of their start."""
        return [*self._adopted, *self._running["load"], *self._running["store"]]

    def discard_running(self, running: PendingOp) -> None:
        of = self._adopted if running in self._adopted else self._running[running.op.direction]
        of.remove(running)

    def take_queued(self) -> list[PendingOp]:
        """All of them, which are forgotten."""
        taken = [*self._queued["load"], *self._queued["store"]]
        for queue in self._queued.values():
            queue.clear()
        return taken

    def take_running(self) -> list[PendingOp]:
        """As `running`; they are forgotten."""
        taken = self.running()
        for running in (self._adopted, *self._running.values()):
            running.clear()
        return taken

    def can_start(self) -> bool:
        """Whether a queued op has room to run."""
        return any(self._has_room(direction) for direction in self._queued)

    def num_queued(self, direction: Direction | None = None) -> int:
        """Of one direction, or of both."""
        return sum(map(len, self._queued.values())) if direction is None else len(self._queued[direction])

    @property
    def are_adopted(self) -> bool:
        """Whether there are adopted ops, and no others."""
        return bool(self._adopted) and self.num_running() == len(self._adopted) and not self.num_queued()

    def num_running(self) -> int:
        return len(self._adopted) + sum(map(len, self._running.values()))

    def _has_room(self, direction: Direction) -> bool:
        return bool(self._queued[direction]) and len(self._running[direction]) < self._at_once[direction]
