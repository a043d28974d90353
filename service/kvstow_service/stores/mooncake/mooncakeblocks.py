"""Mooncake Store as a store below the pools. It implements the protocol of blocks with objects, each of which is one
rank's part of a block."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

from kvstow.errors import KvstowError, TierUnavailableError
from kvstow.tier.blockstore import (
    BlockTransfer,
    Expectation,
    PartCounters,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StorePart,
)
from kvstow.tier.rate import RecentRate
from kvstow_service.stores.actionthread import ActionThread
from kvstow_service.stores.mooncake.answers import Answers
from kvstow_service.stores.mooncake.breaker import Breaker
from kvstow_service.stores.mooncake.objects import (
    MAX_BATCH_BYTES,
    MAX_BATCH_OBJECTS,
    ClientHealth,
    LookupClient,
    MemoryRange,
    MooncakeClients,
    ObjectName,
    SlotObject,
    TransferClient,
)

logger = logging.getLogger("kvstow.tier")

Kind = Literal["put", "get"]

_LOOKUP_SECONDS = 1.0
"""The timeout of a look-up."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""The first and the longest pause in which no block is put because the store is full."""
_END_SECONDS = 60.0
"""How long `close` waits for transfers under way. Each of them ends within 30 s for each rank."""
_PROBE_KEY = bytes(34)
_LOOKUP_WEIGHT = 0.2
KEPT = "Mooncake Store keeps its copies: other nodes may use them, and it drops them when it needs room"


class _Job(NamedTuple):
    """A part of a transfer that fits into one call of the client for each rank."""

    pool: MooncakePool
    transfer: BlockTransfer

    @property
    def num_bytes(self) -> int:
        return len(self.transfer.keys) * sum(self.pool.layout.slot_bytes)


class _Question(NamedTuple):
    """A question of a request: which of these keys the store has."""

    num_ranks: int
    fingerprint: str
    keys: Sequence[bytes]
    on_answer: Callable[[Sequence[bool]], object]


class MooncakeBlocks:
    """See `kvstow.tier.blockstore.BlockStore`.

    One thread puts, one gets, and one asks which objects there are. Each makes one call at a time. Another thread adds
    and removes memory, which may take a network card long. So requests never wait for puts.

    Rank 0's object of a block is put when the objects of all other ranks are in the store, so a look-up that finds it
    may expect them. A block counts as got when the objects of all ranks were.
    """

    name = "mooncake"
    slot_alignment = 1
    answers_at_once = False

    def __init__(self, clients: MooncakeClients, shown: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown, self._clients, self._clock = shown, clients, clock
        self.changed = threading.Condition()
        """Guards all attributes below, and the jobs that pools queue."""
        self.is_closed = False
        self.queues: dict[Kind, deque[_Job]] = {"put": deque(), "get": deque()}
        self.questions: deque[_Question] = deque()
        self.answers = Answers(clock)
        self._running: dict[Kind, _Job] = {}
        self._breaker = Breaker(clock)
        self._pause = self._paused_until = 0.0
        self._lookup_seconds = 0.0
        self._rates: dict[Kind, RecentRate] = {"put": RecentRate(), "get": RecentRate()}
        self._counters = PartCounters()
        self._range_ids = count(1)
        self._transfers: TransferClient
        self._lookups: LookupClient
        self._mapper: ActionThread
        self._threads: list[threading.Thread] = []

    def start(self, witness: int) -> None:
        self._transfers = self._clients.open_transfers(witness)
        self._lookups = self._clients.open_lookups()
        self._mapper = ActionThread("kvstow-tier-memory")
        tasks: dict[str, Callable[[], None]] = {
            "put": partial(self._move_all, "put"),
            "get": partial(self._move_all, "get"),
            "lookup": self._ask_all,
        }
        for purpose, task in tasks.items():
            self._threads.append(threading.Thread(target=task, name=f"kvstow-tier-{purpose}", daemon=True))
            self._threads[-1].start()

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> MooncakePool:
        return MooncakePool(self, layout, on_end)

    def do_later(self, action: Callable[[], object]) -> None:
        """Make a call on the thread that may wait."""
        self._mapper.do(action)

    # -- what pools ask -------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        return self._breaker.is_closed and not self.is_closed

    @property
    def is_full(self) -> bool:
        return self._clock() < self._paused_until

    def expect(self, num_bytes: int) -> Expectation:
        with self.changed:
            queued = sum(job.num_bytes for job in self.queues["get"])
            queued += sum(job.num_bytes for kind, job in self._running.items() if kind == "get")
            rate = self._rates["get"].per_second
            if rate is None:
                return Expectation(None, queued, 0.0)
            return Expectation(self._lookup_seconds + (queued + num_bytes) / rate, queued, queued / rate)

    def add_memory(self, num_bytes: int, fd: int) -> int:
        """Give the store's processes memory, and return its range. Only the thread that may wait calls this. The caller
        keeps `fd`."""
        range_id = next(self._range_ids)
        self._transfers.add_memory(MemoryRange(range_id, num_bytes, fd))
        return range_id

    def remove_memory(self, range_id: int) -> None:
        """Take memory away. Only the thread that may wait calls this. When it returns, no process of the store maps the
        memory."""
        self._transfers.remove_memory(range_id)

    def wait_until_left(self, pool: MooncakePool) -> None:
        """Wait until no transfer of the pool is queued or under way. Only the thread that may wait calls this."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    not any(job.pool is pool for queue in self.queues.values() for job in queue)
                    and not any(job.pool is pool for job in self._running.values())
                )
            )

    # -- transfers ------------------------------------------------------------------------------------------

    def _move_all(self, kind: Kind) -> None:
        queue = self.queues[kind]
        while True:
            with self.changed:
                self._running.pop(kind, None)
                self.changed.notify_all()
                self.changed.wait_for(lambda: queue or self.is_closed)
                if not queue:
                    return
                job = self._running[kind] = queue.popleft()
            try:
                moved = self._move(kind, job)
            except Exception:
                logger.exception("a %s of %d blocks has failed: unexpected error", kind, len(job.transfer.keys))
                moved = []
            with self.changed:
                job.pool.forget(job)
            job.pool.end(job, moved)

    def _move(self, kind: Kind, job: _Job) -> Sequence[int]:
        """Move a job's blocks. Returns the indices of the moved blocks."""
        transfer, pool = job.transfer, job.pool
        if self.is_closed or pool.is_cancelled(transfer.op_id):
            return ()
        left = list(range(len(transfer.keys)))
        bad = Counter[str]()
        last = len(pool.layout.slot_bytes)
        ranks = (*range(1, last), 0) if kind == "put" else range(last)
        try:
            for rank in ranks:
                if left:
                    left = self._move_rank(kind, job, rank, left, bad)
        except TierUnavailableError as outage:
            with self.changed:
                self._log_opened(self._breaker.note_outage(str(outage)))
                self._count(failed_blocks=len(transfer.keys))
            logger.warning("a %s of %d blocks has failed: %s", kind, len(transfer.keys), outage)
            return ()
        self._note_moved(kind, job, left, bad)
        return left

    def _move_rank(self, kind: Kind, job: _Job, rank: int, indices: Sequence[int], bad: Counter[str]) -> list[int]:
        """Move the objects of one rank. Returns the indices of the objects that were moved, and counts the others in
        `bad` by what became of them."""
        transfer, layout, rate = job.transfer, job.pool.layout, self._rates[kind]
        num_bytes, num_ranks = layout.slot_bytes[rank], len(layout.slot_bytes)
        objects = [
            SlotObject(
                ObjectName(transfer.fingerprint, transfer.keys[index], rank, num_ranks),
                *job.pool.place_of(rank, transfer.slots[index]),
                num_bytes,
            )
            for index in indices
        ]
        begun, total = self._clock(), num_bytes * len(objects)
        statuses: Sequence[str]
        if kind == "put":
            statuses = self._transfers.put(objects, rate.timeout(total))
        else:
            statuses = self._transfers.get(objects, rate.timeout(total))
        moved = [index for index, status in zip(indices, statuses, strict=True) if status in ("stored", "found")]
        bad.update(status for status in statuses if status not in ("stored", "found"))
        with self.changed:
            if len(moved) == len(objects):
                rate.observe(total, self._clock() - begun)
            self._note_full("full" in statuses, kind)
        return moved

    def _note_full(self, is_full: bool, kind: Kind) -> None:
        if is_full:
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
            self._paused_until = self._clock() + self._pause
        elif kind == "put":
            self._pause = 0.0

    def _note_moved(self, kind: Kind, job: _Job, moved: Sequence[int], bad: Counter[str]) -> None:
        transfer, num_bytes = job.transfer, len(moved) * sum(job.pool.layout.slot_bytes)
        keys = [transfer.keys[index] for index in moved]
        corrupt, failed = bad["corrupt"], bad["failed"]
        with self.changed:
            self.answers.note_moved(transfer.fingerprint, keys)
            if kind == "get":
                gone = set(transfer.keys).difference(keys)
                self.answers.note(transfer.fingerprint, gone, present=False)
                self._count(read_blocks=len(keys), read_bytes=num_bytes, corrupt_blocks=corrupt, failed_blocks=failed)
            else:
                self._count(
                    written_blocks=len(keys), written_bytes=num_bytes, failed_blocks=failed, refused_blocks=bad["full"]
                )
            if 2 * failed > len(transfer.keys):
                reason = f"{failed} of {len(transfer.keys)} blocks could not be moved"
                self._log_opened(self._breaker.note_failure(reason))
            else:
                self._breaker.note_success()
        if corrupt:
            logger.error("%d of %d blocks that were read are not what was written", corrupt, len(transfer.keys))

    def _count(self, **more: int) -> None:
        counters = self._counters
        self._counters = replace(counters, **{name: getattr(counters, name) + count for name, count in more.items()})

    def _log_opened(self, has_opened: bool) -> None:
        if has_opened:
            logger.warning("the store is left alone until it answers again: %s", self._breaker.reason)

    # -- look-ups -------------------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        while True:
            with self.changed:
                while not (self.questions or self.is_closed or self._breaker.seconds_to_probe() == 0.0):
                    self.changed.wait(self._breaker.seconds_to_probe())
                if self.is_closed:
                    break
                is_probe = self._breaker.wants_probe()
                question = self.questions.popleft() if self.questions and not is_probe else None
            if question is not None:
                self._answer(question)
            elif is_probe:
                error = self._exists([ObjectName("probe", _PROBE_KEY, 0, 1)])[1]
                with self.changed:
                    if self._breaker.note_probe(error):
                        logger.info("the store answers again")
        for question in self.questions:
            question.on_answer([False] * len(question.keys))

    def _answer(self, question: _Question) -> None:
        """Answer a question. The store is only asked about keys that are still unknown."""
        fingerprint, keys = question.fingerprint, question.keys
        with self.changed:
            known = self.answers.known(fingerprint, keys)
            is_closed = self._breaker.is_closed
        asked = list(dict.fromkeys(key for key, one in zip(keys, known, strict=True) if one is None))
        found: dict[bytes, bool] = {}
        if asked and is_closed:
            begun = self._clock()
            answers, error = self._exists([ObjectName(fingerprint, key, 0, question.num_ranks) for key in asked])
            found = dict(zip(asked, answers, strict=True))
            with self.changed:
                self.answers.note(fingerprint, [key for key in asked if found[key]], present=True)
                self.answers.note(fingerprint, [key for key in asked if not found[key]], present=False)
                if error is None:
                    self._lookup_seconds += _LOOKUP_WEIGHT * (self._clock() - begun - self._lookup_seconds)
                else:
                    self._log_opened(self._breaker.note_outage(error))
        question.on_answer(
            [found.get(key, False) if one is None else one for key, one in zip(keys, known, strict=True)]
        )

    def _exists(self, names: list[ObjectName]) -> tuple[list[bool], str | None]:
        """Ask the store which of these objects it has. Returns the answer, and the error if there was none. After an
        error, no object counts as found."""
        try:
            found = self._lookups.exists(names, _LOOKUP_SECONDS)
            if len(found) != len(names):
                raise ValueError(f"the store gave {len(found)} answers for {len(names)} objects")
            return found, None
        except TierUnavailableError as outage:
            error = str(outage)
        except Exception as defect:
            logger.exception("a look-up of %d objects has failed: unexpected error", len(names))
            error = repr(defect)
        return [False] * len(names), error

    # -- for operators, and the end ---------------------------------------------------------------------------

    def parts(self) -> Sequence[StorePart]:
        transfers, lookups = self._transfers.health(), self._lookups.health()
        with self.changed:
            return [
                replace(
                    self._part("transfers of the node", transfers, self._counters),
                    queued_read_bytes=sum(job.num_bytes for job in self.queues["get"]),
                    queued_write_bytes=sum(job.num_bytes for job in self.queues["put"]),
                    read_bytes_per_second=self._rates["get"].per_second,
                    write_bytes_per_second=self._rates["put"].per_second,
                ),
                self._part("look-ups of the node", lookups, PartCounters()),
            ]

    def _part(self, name: str, health: ClientHealth, counters: PartCounters) -> StorePart:
        counters = replace(counters, restarts=health.restarts, timeouts=health.timeouts)
        if health.state == "on" and not self._breaker.is_closed:
            reason = f"it is left alone until it answers again: {self._breaker.reason}"
            return StorePart(name=name, state="starting", reason=reason, counters=counters)
        return StorePart(name=name, state=health.state, reason=health.reason, counters=counters)

    def close(self) -> None:
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            self.changed.notify_all()
        if not self._threads:
            return
        self._transfers.close()  # calls under way end with it
        self._lookups.close()
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self._mapper.close(_END_SECONDS)


class MooncakePool:
    """Mooncake Store as one pool uses it; see `kvstow.tier.blockstore.StoredPool`."""

    def __init__(
        self, store: MooncakeBlocks, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]
    ) -> None:
        self.layout = layout
        self._store, self._on_end = store, on_end
        self._extents: list[dict[int, tuple[StoredExtent, int]]] = [{} for _ in layout.slot_bytes]
        """The extents of each rank and their ranges, by number. One thread replaces the list, any may read it."""
        self._writing: set[tuple[str, bytes]] = set()
        self._cancelled: set[int] = set()
        self._has_left = False
        self._most = max(1, min(MAX_BATCH_OBJECTS, MAX_BATCH_BYTES // max(layout.slot_bytes)))
        """The largest number of blocks in one call."""

    # -- what the store has -----------------------------------------------------------------------------------

    def has(
        self, fingerprint: str, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool] | None:
        store = self._store
        with store.changed:
            if self._has_left or not store.is_working:
                return [False] * len(keys)
            known = store.answers.known(fingerprint, keys)
            if None not in known:
                return [bool(one) for one in known]
            ranks = len(self.layout.slot_bytes)
            store.questions.append(_Question(ranks, fingerprint, keys, on_answer))
            store.changed.notify_all()
        return None

    def offer(self, fingerprint: str, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        """Return the blocks to write. Blocks that this node has put or got before are expected to be in the store. Uses
        are not noted, because Mooncake has its own order of eviction."""
        store, name = self._store, fingerprint
        with store.changed:
            if self._has_left or not store.is_working or store.is_full:
                return ()
            return [
                index
                for index, key in enumerate(keys)
                if (name, key) not in self._writing and not store.answers.is_moved(name, key)
            ]

    def expect(self, num_blocks: int) -> Expectation:
        return self._store.expect(num_blocks * sum(self.layout.slot_bytes))

    # -- transfers --------------------------------------------------------------------------------------------

    def read(self, transfer: BlockTransfer) -> None:
        self._queue("get", transfer)

    def write(self, transfer: BlockTransfer) -> None:
        with self._store.changed:
            self._writing.update((transfer.fingerprint, key) for key in transfer.keys)
        self._queue("put", transfer)

    def _queue(self, kind: Kind, transfer: BlockTransfer) -> None:
        store, step = self._store, self._most
        parts = [
            transfer._replace(keys=transfer.keys[at : at + step], slots=transfer.slots[at : at + step])
            for at in range(0, len(transfer.keys), step)
        ]
        with store.changed:
            if not store.is_closed:
                store.queues[kind].extend(_Job(self, part) for part in parts)
                store.changed.notify_all()
                return
        for part in parts:
            store.do_later(partial(self.end, _Job(self, part), ()))

    def cancel(self, op_id: int) -> None:
        with self._store.changed:
            if any(job.transfer.op_id == op_id for queue in self._store.queues.values() for job in queue):
                self._cancelled.add(op_id)

    def is_cancelled(self, op_id: int) -> bool:
        """Whether no further part of the transfer may begin."""
        return self._has_left or op_id in self._cancelled

    def end(self, job: _Job, moved: Sequence[int]) -> None:
        """Give the slots of a job back. `moved`: the indices of the blocks that were moved. Only the store's threads
        call this."""
        good = [job.transfer.slots[index] for index in moved]
        bad = sorted(set(job.transfer.slots).difference(good))
        try:
            self._on_end([Piece(job.transfer.op_id, good, bad)])
        except Exception:
            logger.exception("the end of a transfer of pool %s could not be noted", self.layout.pool)

    def forget(self, job: _Job) -> None:
        """Note that a part of a transfer has ended. The caller holds the store's lock."""
        name = job.transfer.fingerprint
        self._writing.difference_update((name, key) for key in job.transfer.keys)

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        self._store.do_later(lambda: then(Purged(0, KEPT)))

    # -- memory: the thread that may wait ---------------------------------------------------------------------

    def place_of(self, rank: int, slot: int) -> tuple[int, int]:
        """Return the range in which a slot is, and the offset in it."""
        for extent, range_id in self._extents[rank].values():
            if extent.first_slot <= slot < extent.first_slot + extent.num_slots:
                return range_id, (slot - extent.first_slot) * extent.slot_stride
        raise LookupError(f"slot {slot} is in memory that the node's transfers do not have")

    def add_extent(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None:
        own = os.dup(fd)
        self._store.do_later(lambda: self._add(rank, extent, own, then))

    def _add(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None:
        problem = "the pool has left the store" if self._has_left else ""
        try:
            if not problem:
                range_id = self._store.add_memory(extent.num_bytes, fd)
                self._extents[rank] = {**self._extents[rank], extent.extent_id: (extent, range_id)}
        except (OSError, KvstowError) as error:
            problem = f"memory of rank {rank} could not be mapped: {error}"
        finally:
            os.close(fd)
        then(problem)

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        self._store.do_later(lambda: self._remove(rank, extent_id, then))

    def _remove(self, rank: int, extent_id: int, then: Callable[[], object] = lambda: None) -> None:
        extents = dict(self._extents[rank])
        found = extents.pop(extent_id, None)
        self._extents[rank] = extents
        if found is not None:
            self._store.remove_memory(found[1])
        then()

    def leave(self, then: Callable[[], object]) -> None:
        with self._store.changed:
            if self._has_left:
                return
            self._has_left = True
            self._store.changed.notify_all()
        self._store.do_later(lambda: self._leave(then))

    def _leave(self, then: Callable[[], object]) -> None:
        try:
            with ExitStack() as stack:  # all callbacks are made, even after an error
                for rank, extents in enumerate(self._extents):
                    for extent_id in list(extents):
                        stack.callback(self._remove, rank, extent_id)
                stack.callback(self._store.wait_until_left, self)
        finally:
            then()
