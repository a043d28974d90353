"""The threads that move slots to and from the store of the fleet tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvstow.errors import CopyError, TierUnavailableError
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.rate import RecentRate
from kvstow.tier.store import ClientStats, ObjectName, SlotObject, TransferClient

logger = logging.getLogger("kvstow.tier")


class TransferMemory(Protocol):
    """The memory of a rank's slots."""

    slot_bytes: int

    def addresses(self, slots: Any) -> Any:
        """Where slots begin, for an array of int64. Raises `CopyError` for slots that are not there."""


class _Job(NamedTuple):
    op: TierOp
    memory: TransferMemory
    rank: int
    num_ranks: int
    on_end: Callable[[TierCompletion], object]
    submitted: float

    def fail(
        self, error: str, *, outage: bool = False, seconds: float = 0.0, queue_seconds: float = 0.0
    ) -> TierCompletion:
        return TierCompletion(self.op.op_id, "failed", error, 0, seconds, queue_seconds, outage=outage)


class StoreTransfers:
    """Runs the puts and the fetches of all ranks and pools that share a client, each in order, with one thread for each
    kind: a fetch, for which a request waits, never waits for puts.

    Slots: an op has ended when its completion is there, and not before the client's call for it has returned. The owner
    keeps the memory of its slots in place until then. Thread-safe; `submit` never waits.
    """

    def __init__(self, client: TransferClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`client` knows the memory of an op before the op is submitted, and is closed by `close`."""
        self.client = client
        self._clock = clock
        self._changed = threading.Condition()
        self._is_closed = False
        self._queues: dict[str, deque[_Job]] = {"put": deque(), "fetch": deque()}
        self._running: dict[str, _Job] = {}
        self._ended_at: dict[tuple[str, TransferMemory], float] = {}
        self.rates = {kind: RecentRate() for kind in self._queues}
        self._put, self._got = [0, 0], [0, 0, 0]
        """Objects and bytes; of what was got, also the corrupt objects. Written by the thread of each kind."""
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"kvstow-tier-{kind}", daemon=True)
            for kind in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        op: TierOp,
        memory: TransferMemory,
        rank: int,
        num_ranks: int,
        on_end: Callable[[TierCompletion], object],
    ) -> None:
        """Run the op, which fits into one call of the client, on the slots of this rank. `on_end` is called once, on
        any thread, and must not wait."""
        job = _Job(op, memory, rank, num_ranks, on_end, self._clock())
        with self._changed:
            if not self._is_closed:
                self._queues[op.direction].append(job)
                self._changed.notify_all()
                return
        on_end(job.fail("the transfers were closed"))

    def stats(self) -> ClientStats:
        put, got = self._put, self._got
        return replace(
            self.client.stats(),
            put_objects=put[0],
            put_bytes=put[1],
            get_objects=got[0],
            get_bytes=got[1],
            corrupt_objects=got[2],
        )

    def drop(self, memories: Collection[TransferMemory]) -> None:
        """Fail the ops on these memories that have not begun, and wait for those that have."""
        self._fail_queued(lambda job: job.memory in memories)
        with self._changed:
            self._changed.wait_for(lambda: not any(job.memory in memories for job in self._running.values()))
            self._ended_at = {key: at for key, at in self._ended_at.items() if key[1] not in memories}

    def close(self) -> None:
        """Fail what has not begun, close the client, and wait for what has begun. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_queued(lambda job: True)
        self.client.close()
        for thread in self._threads:
            thread.join()

    def _fail_queued(self, matches: Callable[[_Job], bool]) -> None:
        with self._changed:
            failed = [job for queue in self._queues.values() for job in queue if matches(job)]
            for job in failed:
                self._queues[job.op.direction].remove(job)
        for job in failed:
            job.on_end(job.fail("the transfers were closed"))

    # -- the threads ----------------------------------------------------------------------------------------

    def _run(self, kind: str) -> None:
        queue = self._queues[kind]
        while True:
            with self._changed:
                self._running.pop(kind, None)
                self._changed.notify_all()
                self._changed.wait_for(lambda: queue or self._is_closed)
                if not queue:
                    return
                job = self._running[kind] = queue.popleft()
            try:
                completion = self._move(job)
            except Exception as error:
                logger.exception("%s %d failed: unexpected error", kind, job.op.op_id)
                completion = job.fail(repr(error))
            job.on_end(completion)

    def _move(self, job: _Job) -> TierCompletion:
        op, slot_bytes = job.op, job.memory.slot_bytes
        # What a rank waits for the others' calls counts as its own time: a block has arrived when all ranks have it.
        begun = max(job.submitted, self._ended_at.get((op.direction, job.memory), 0.0))
        queue_seconds = begun - job.submitted
        moved = failed = 0
        full, error = False, None
        try:
            moved, failed, full = self._call(job)
        except TierUnavailableError as outage:
            logger.warning("%s %d of %d blocks failed: %s", op.direction, op.op_id, len(op.slots), outage)
            return job.fail(str(outage), outage=True, seconds=self._clock() - begun, queue_seconds=queue_seconds)
        except CopyError as gone:
            error = str(gone)
        finally:
            ended = self._clock()
            with self._changed:
                self._ended_at[op.direction, job.memory] = ended
        return TierCompletion(
            op.op_id,
            "failed" if error else "done",
            error,
            moved * slot_bytes,
            ended - begun,
            queue_seconds,
            moved=moved,
            failed=failed,
            full=full,
        )

    def _call(self, job: _Job) -> tuple[int, int, bool]:
        """Returns how many leading objects were moved, how many the store could not move, and whether it was full."""
        op, slot_bytes, rate = job.op, job.memory.slot_bytes, self.rates[job.op.direction]
        addresses: list[int] = job.memory.addresses(np.array(op.slots, np.int64)).tolist()
        objects = [
            SlotObject(ObjectName(op.fingerprint, key, job.rank, job.num_ranks), address, slot_bytes)
            for key, address in zip(op.keys, addresses, strict=True)
        ]
        num_bytes, begun = len(objects) * slot_bytes, self._clock()
        call: Callable[[Sequence[SlotObject], float], Sequence[str]]
        is_put = op.direction == "put"
        call, good = (self.client.put, "stored") if is_put else (self.client.get, "found")
        statuses: Sequence[str] = call(objects, rate.timeout(num_bytes))
        whole = statuses.count(good)
        counts, corrupt = self._put if is_put else self._got, statuses.count("corrupt")
        counts[:] = [count + more for count, more in zip(counts, (whole, whole * slot_bytes, corrupt), strict=False)]
        if corrupt:
            logger.error("%d of %d objects fetched were not what was put", corrupt, len(objects))
        moved = next((at for at, status in enumerate(statuses) if status != good), len(statuses))
        if moved == len(objects):
            rate.observe(num_bytes, self._clock() - begun)
        return moved, statuses.count("failed"), "full" in statuses
