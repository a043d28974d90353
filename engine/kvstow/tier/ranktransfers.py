"""The transfers of one rank: two threads that move slots to and from the store of the fleet tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvstow.errors import CopyError, TierUnavailableError
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.rate import TransferRate
from kvstow.tier.store import MAX_BATCH_BYTES, MAX_BATCH_OBJECTS, ObjectName, SlotObject, TransferClient

logger = logging.getLogger("kvstow.tier")


class TransferMemory(Protocol):
    """The memory of a rank's slots."""

    slot_bytes: int

    def addresses(self, slots: Any) -> Any:
        """Where slots begin, for an array of int64. Raises `CopyError` for slots that are not there."""


class RankTransfers:
    """Runs the puts and the fetches that it is given, each in order, with one thread for each kind: a fetch, for which
    a request waits, never waits for puts.

    Slots: an op has ended when its completion is there, and not before the client's last call for it has returned. The
    owner keeps the memory of its slots in place until then. Thread-safe; `submit` and `take_completions` never wait.
    """

    def __init__(
        self,
        memory: TransferMemory,
        client: TransferClient,
        name_of: Callable[[str, bytes], ObjectName],
        *,
        on_news: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` knows the memory already, and is closed by `close`. `name_of`: this rank's object of a fingerprint
        and a key. `on_news` is called on a thread of this object after each completion; it must not wait."""
        self._memory, self._client, self._name_of = memory, client, name_of
        self._on_news, self._clock = on_news, clock
        self._state = threading.Condition()
        self._completions: list[TierCompletion] = []
        self._closing = False
        self._queues: dict[str, deque[tuple[TierOp, float]]] = {"put": deque(), "fetch": deque()}
        self.put_rate, self.fetch_rate = TransferRate(), TransferRate()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"kvstow-tier-{kind}", daemon=True)
            for kind in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: TierOp) -> None:
        """Each op that is submitted ends with one completion."""
        with self._state:
            if not self._closing:
                self._queues[op.direction].append((op, self._clock()))
                self._state.notify_all()
                return
        self._finish(_failed(op, "the rank's transfers were closed"))

    def take_completions(self) -> list[TierCompletion]:
        """All ops that have ended since the last call, in order."""
        with self._state:
            taken, self._completions = self._completions, []
            return taken

    def close(self) -> None:
        """Fail what has not begun, wait for what has, and close the client. Idempotent."""
        with self._state:
            self._closing = True
            left = [op for queue in self._queues.values() for op, _ in queue]
            for queue in self._queues.values():
                queue.clear()
            self._state.notify_all()
        for op in left:
            self._finish(_failed(op, "the rank's transfers were closed"))
        self._client.close()
        for thread in self._threads:
            thread.join()

    # The threads.

    def _run(self, kind: str) -> None:
        queue = self._queues[kind]
        while True:
            with self._state:
                self._state.wait_for(lambda: queue or self._closing)
                if not queue:
                    return
                op, submitted = queue.popleft()
            begun = self._clock()
            try:
                completion = self._move(op, begun - submitted)
            except Exception as error:
                logger.exception("%s %d failed: unexpected error", op.direction, op.op_id)
                completion = _failed(op, repr(error))
            self._finish(completion)

    def _finish(self, completion: TierCompletion) -> None:
        with self._state:
            self._completions.append(completion)
        if self._on_news is not None:
            self._on_news()

    def _move(self, op: TierOp, queue_seconds: float) -> TierCompletion:
        moved = failed = 0
        seconds = 0.0
        full, error = False, None
        try:
            for batch in self._batches(op):
                begun = self._clock()
                try:
                    good, bad, full = self._call(op, batch)
                finally:
                    taken = self._clock() - begun
                    seconds += taken
                moved += good
                failed += bad
                rate = self.put_rate if op.direction == "put" else self.fetch_rate
                if good == len(batch):
                    rate.observe(good * self._memory.slot_bytes, taken)
                else:
                    break
        except TierUnavailableError as outage:
            logger.warning("%s %d of %d blocks failed: %s", op.direction, op.op_id, len(op.slots), outage)
            return _failed(op, str(outage), outage=True, seconds=seconds, queue_seconds=queue_seconds)
        except CopyError as gone:
            error = str(gone)
        return TierCompletion(
            op.op_id,
            "failed" if error else "done",
            error,
            moved * self._memory.slot_bytes,
            seconds,
            queue_seconds,
            moved=moved,
            failed=failed,
            full=full,
        )

    def _call(self, op: TierOp, batch: Sequence[SlotObject]) -> tuple[int, int, bool]:
        """Returns how many leading objects were moved, how many the store could not move, and whether it was full."""
        num_bytes = len(batch) * self._memory.slot_bytes
        if op.direction == "put":
            put = self._client.put(batch, self.put_rate.timeout(num_bytes))
            return _leading(put, "stored"), put.count("failed"), "full" in put
        got = self._client.get(batch, self.fetch_rate.timeout(num_bytes))
        if "corrupt" in got:
            logger.error("%d of %d objects fetched were not what was put", got.count("corrupt"), len(batch))
        return _leading(got, "found"), got.count("failed"), False

    def _batches(self, op: TierOp) -> Iterator[list[SlotObject]]:
        slot_bytes = self._memory.slot_bytes
        most = max(1, min(MAX_BATCH_OBJECTS, MAX_BATCH_BYTES // slot_bytes))
        addresses: list[int] = self._memory.addresses(np.array(op.slots, np.int64)).tolist()
        for first in range(0, len(addresses), most):
            end = first + most
            yield [
                SlotObject(self._name_of(op.fingerprint, key), address, slot_bytes)
                for key, address in zip(op.keys[first:end], addresses[first:end], strict=True)
            ]


def _leading(statuses: Sequence[str], good: str) -> int:
    return next((at for at, status in enumerate(statuses) if status != good), len(statuses))


def _failed(
    op: TierOp, error: str, *, outage: bool = False, seconds: float = 0.0, queue_seconds: float = 0.0
) -> TierCompletion:
    return TierCompletion(op.op_id, "failed", error, 0, seconds, queue_seconds, outage=outage)
