"""The pinned memory of a pool, as a client of the tier's store may use it while the pool grows and shrinks."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from functools import partial
from typing import NamedTuple

from kvstow.errors import CopyError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.slotpool import Hold, Int64Array
from kvstow.tier.store import MemoryRange, TransferClient

logger = logging.getLogger("kvstow.tier")

_GROWTH = 8
"""While a pool grows, memory is lent when it is an eighth of what is lent already: each range costs a client two file
descriptors and a call, and a pool has thousands of chunks."""


class _Lent(NamedTuple):
    """Slots `first` up to, but not including, `end`."""

    first: int
    end: int
    memory: MemoryRange


class LentMemory:
    """Lends a pool's pinned slots to a client: a `SlotMemory` for `RankTransfers`.

    A thread of its own adds ranges to the client as the pool grows, and removes them before the pool gives their memory
    back: what is lent is held (`SlotPool.hold`). So no client, and no network card, ever knows memory that has gone.
    Memory that a transfer uses is not taken back before the transfer has ended.

    Thread-safe. `look` never waits. `hold` waits while the slots asked for are about to be lent: it is for threads of
    transfers.
    """

    def __init__(self, pool: HostPool, client: TransferClient) -> None:
        """The owner calls `look` after each change of the pool, and `close` before it closes the pool."""
        self.slot_bytes = pool.slot_bytes
        self._pool, self._client = pool, client
        self._state = threading.Condition()
        # Under the condition's lock:
        self._end = 0  # slots below it may be used
        self._users: Counter[int] = Counter()  # by the slot at which they end
        self._asked = 0  # somebody waits for the slots below it
        self._has_news = True
        self._closing = False
        self._failure: str | None = None
        # Of the thread:
        self._lent: list[_Lent] = []
        self._hold: Hold | None = None
        self._thread = threading.Thread(target=self._run, name="kvstow-tier-memory", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """The pool may have changed."""
        with self._state:
            self._has_news = True
            self._state.notify_all()

    @property
    def lent_slots(self) -> int:
        """Slots below it may be used."""
        with self._state:
            return self._end

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self._pool.addresses(slots)

    def hold(self, end_slot: int) -> Hold:
        """Keep the memory of all slots below `end_slot` with the client until the hold is released. Raises `CopyError`
        if they are not all pinned."""
        with self._state:
            while self._end < end_slot:
                if self._closing or self._failure is not None:
                    raise CopyError(self._failure or "the rank's memory is no longer lent to the tier's store")
                if (pinned := self._pool.pinned_slots) < end_slot:
                    raise CopyError(f"slot {end_slot - 1} is not pinned; the pool has {pinned} slots pinned")
                self._asked = max(self._asked, end_slot)
                self._has_news = True
                self._state.notify_all()
                self._state.wait()
            self._users[end_slot] += 1
        return Hold(partial(self._release, end_slot))

    def _release(self, end_slot: int) -> None:
        with self._state:
            self._users[end_slot] -= 1
            if not self._users[end_slot]:
                del self._users[end_slot]
            self._state.notify_all()

    def stop(self) -> None:
        """Lend nothing more: who waits in `hold` gets an error. Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()

    def close(self) -> None:
        """Let go of the pool's memory. The client was closed before, and no transfer is under way. Idempotent."""
        self.stop()
        self._thread.join()
        if self._hold is not None:
            self._hold.release()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._has_news or self._closing)
                if self._closing:
                    return
                self._has_news = False
                asked, self._asked = self._asked, 0
            try:
                self._follow(asked)
            except Exception as error:
                logger.exception("the rank's memory cannot be lent to the tier's store: unexpected error")
                with self._state:
                    self._failure = f"the rank's memory cannot be lent to the tier's store: {error!r}"
                    self._state.notify_all()
                return

    def _follow(self, asked: int) -> None:
        pinned, end = self._pool.pinned_slots, self._lent[-1].end if self._lent else 0
        if pinned < end:
            self._shrink(pinned)
        elif pinned > end:
            is_growing = self._pool.status().state == "pinning"
            if not is_growing or asked > end or (pinned - end) * _GROWTH >= end:
                self._grow(end, pinned)

    def _grow(self, first: int, end: int) -> None:
        if self._hold_slots(end):
            self._lend(first, end)
            self._set_end(end)

    def _shrink(self, end: int) -> None:
        """Keep the slots below `end`."""
        keep = [lent for lent in self._lent if lent.end <= end]
        first = keep[-1].end if keep else 0
        with self._state:
            self._end = first
            self._state.wait_for(lambda: self._closing or not any(user > first for user in self._users))
            if self._closing:
                return
        for lent in reversed(self._lent[len(keep) :]):
            self._client.remove_memory(lent.memory)
        self._lent = keep
        if first < end:
            self._lend(first, end)  # the lower part of a range
        self._hold_slots(end)
        self._set_end(end)

    def _hold_slots(self, end: int) -> bool:
        """Hold these slots instead of those held until now. False if the pool has shrunk meanwhile: then it goes on
        with the others."""
        try:
            hold = self._pool.hold(end) if end else None
        except CopyError:
            self.look()
            return False
        before, self._hold = self._hold, hold
        if before is not None:
            before.release()
        return True

    def _lend(self, first: int, end: int) -> None:
        whole, stride = self._pool.memory_range, self._pool.slot_stride
        start = first * stride
        memory = MemoryRange(whole.address + start, (end - first) * stride, whole.fd, whole.offset + start)
        self._client.add_memory(memory)
        self._lent.append(_Lent(first, end, memory))

    def _set_end(self, end: int) -> None:
        with self._state:
            self._end = end
            self._state.notify_all()
