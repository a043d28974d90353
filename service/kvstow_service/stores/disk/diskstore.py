"""Blocks on the node's own disks: see `kvstow.tier.blockstore.BlockStore`."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from kvstow.tier.blockstore import (
    BlockTransfer,
    Expectation,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StorePart,
)
from kvstow_service.stores.actionthread import ActionThread
from kvstow_service.stores.disk.diskformat import PlaceKind, name_digests, namespace_number, padded
from kvstow_service.stores.disk.diskmessages import Direction, Open, PartAt
from kvstow_service.stores.disk.diskpath import DiskPath
from kvstow_service.stores.disk.pathchannel import PathChannel
from kvstow_service.stores.disk.pathqueue import Job, Outstanding
from kvstow_service.stores.disk.places import BlockName, Selection, key_start
from kvstow_service.stores.disk.startcheck import CheckedPath
from kvstow_service.stores.disk.writebudget import UsedNames


class _Extent(NamedTuple):
    """An extent of a pool. `number`: its name in all child processes. `fd`: a duplicate, for processes that start
    later."""

    number: int
    extent: StoredExtent
    fd: int


class _RankExtents:
    """The extents of one rank, in the order of their slots."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._extents: list[_Extent] = []

    def add(self, one: _Extent) -> None:
        at = bisect_right(self._firsts, one.extent.first_slot)
        self._firsts.insert(at, one.extent.first_slot)
        self._extents.insert(at, one)

    def remove(self, extent_id: int) -> _Extent | None:
        for at, one in enumerate(self._extents):
            if one.extent.extent_id == extent_id:
                del self._firsts[at], self._extents[at]
                return one
        return None

    def part_of(self, slot: int, num_bytes: int) -> PartAt:
        """Return where the `num_bytes` of a slot are."""
        number, extent, _ = self._extents[bisect_right(self._firsts, slot) - 1]
        return PartAt(number, (slot - extent.first_slot) * extent.slot_stride, num_bytes)

    def all(self) -> list[_Extent]:
        return list(self._extents)


@dataclass(slots=True)
class _Op:
    """A transfer. `left`: how many of its slots the store still has. `waiting`: its jobs that were queued, each with
    its path. Some of them may have begun since."""

    pool: DiskPool
    left: int = 0
    waiting: list[tuple[Job, DiskPath]] = field(default_factory=list)


class DiskPool:
    """See `kvstow.tier.blockstore.StoredPool`."""

    def __init__(
        self, store: DiskStore, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object], alignment: int
    ) -> None:
        self._store, self._layout, self.on_end = store, layout, on_end
        self._padded = [padded(size, alignment) for size in layout.slot_bytes]
        self._kind = PlaceKind(layout.owner, layout.identity, sum(self._padded))
        self._ranks = [_RankExtents() for _ in layout.slot_bytes]
        self._num_lent = 0
        self._leaving: Outstanding | None = None
        """Waits for the pool's slots and memory, once it leaves."""

    # -- what the store has ---------------------------------------------------------------------------------

    def has(
        self, fingerprint: str, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool]:
        if self._leaving is not None:
            return [False] * len(keys)
        digests = name_digests(namespace_number(fingerprint), keys)
        with self._store.lock:
            indexes = [disk.places.index for disk in self._store.disks if disk.is_on]
            if len(indexes) == 1:
                return list(map(indexes[0].__contains__, digests))
            return [any(digest in index for index in indexes) for digest in digests]

    def offer(self, fingerprint: str, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        if self._leaving is not None:
            return []
        digests = name_digests(namespace_number(fingerprint), keys)
        store, wanted = self._store, list[int]()
        with store.lock:
            may_write = [
                any(disk.can_write(self._kind, was_used_again=is_again) for disk in store.disks)
                for is_again in (False, True)
            ]
            for at in range(len(keys) - 1, -1, -1):  # from the end, so that the root is the last one used
                found = store.find(digests[at])
                if found is not None:
                    found[0].use(found[1])
                elif may_write[store.was_used(digests[at], is_use=is_use)] and digests[at] not in store.writing:
                    wanted.append(at)
        return wanted[::-1]

    def expect(self, num_blocks: int) -> Expectation:
        with self._store.lock:
            return self._store.expect(num_blocks * self._kind.place_bytes)

    # -- transfers ------------------------------------------------------------------------------------------

    def read(self, transfer: BlockTransfer) -> None:
        self._begin(transfer, "read")

    def write(self, transfer: BlockTransfer) -> None:
        self._begin(transfer, "write")

    def _begin(self, transfer: BlockTransfer, direction: Direction) -> None:
        namespace, store = namespace_number(transfer.fingerprint), self._store
        digests = name_digests(namespace, transfer.keys)
        with store.lock:
            if self._leaving is not None:
                store.calls.do(partial(self.on_end, [Piece(transfer.op_id, (), transfer.slots)]))
                return
            jobs = [
                Job(
                    transfer.op_id,
                    direction,
                    BlockName(digest, namespace, key_start(key)),
                    key,
                    self._kind,
                    slot,
                    self._parts_of(slot),
                )
                for key, digest, slot in zip(transfer.keys, digests, transfer.slots, strict=True)
            ]
            store.ops[transfer.op_id] = op = _Op(self, len(jobs))
            self._num_lent += len(jobs)
            queue = store.queue_read if direction == "read" else store.queue_write
            op.waiting += [(job, disk) for job in jobs if (disk := queue(job)) is not None]
            for disk in store.disks:
                disk.pump()

    def _parts_of(self, slot: int) -> tuple[PartAt, ...]:
        sizes = self._layout.slot_bytes
        return tuple(held.part_of(slot, num_bytes) for held, num_bytes in zip(self._ranks, sizes, strict=True))

    def cancel(self, op_id: int) -> None:
        with self._store.lock:
            if (op := self._store.ops.get(op_id)) is not None:
                self._store.cancel(op)

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        store = self._store
        with store.lock:
            selection = self._selection(wish, store.wall())
            chosen: list[tuple[DiskPath, int | None]] = []

            def end() -> None:
                notices = [notice for disk, count in chosen if (notice := disk.purge_notice(count))]
                result = Purged(sum(count or 0 for _, count in chosen), "; ".join(notices))
                store.calls.do(lambda: then(result))

            purge = Outstanding(end)
            purge.add(self)
            chosen += [(disk, disk.purge(selection, None if dry_run else purge)) for disk in store.disks]
            purge.done(self)

    def _selection(self, wish: PurgeWish, now: float) -> Selection:
        return Selection(
            self._layout.identity,
            None if wish.fingerprint is None else namespace_number(wish.fingerprint),
            None if wish.keys is None else frozenset(wish.keys),
            wish.key_prefixes or (),
            None if wish.age_seconds is None else now - wish.age_seconds,
            None if wish.idle_seconds is None else now - wish.idle_seconds,
        )

    # -- memory ---------------------------------------------------------------------------------------------

    def add_extent(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None:
        store = self._store
        with store.lock:
            problem = ""
            if extent.slot_stride < self._padded[rank] or extent.slot_stride % store.slot_alignment:
                problem = (
                    f"slots of rank {rank} begin every {extent.slot_stride} bytes, and disks need multiples of "
                    f"{store.slot_alignment} bytes; only a pool that is made while the node has disks has them"
                )
            elif self._leaving is None:
                one = _Extent(next(store.extent_numbers), extent, os.dup(fd))
                self._ranks[rank].add(one)
                for disk in store.disks:
                    disk.add_extent(one.number, one.fd, extent.num_bytes)
            store.calls.do(lambda: then(problem))

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        with self._store.lock:
            waiting = self._waiting(then)
            self._remove_extent(rank, extent_id, waiting)
            waiting.done(self)

    def _remove_extent(self, rank: int, extent_id: int, waiting: Outstanding) -> None:
        one = self._ranks[rank].remove(extent_id)
        if one is not None:
            for disk in self._store.disks:
                disk.remove_extent(one.number, waiting)
            os.close(one.fd)

    def _waiting(self, then: Callable[[], object]) -> Outstanding:
        """Return an `Outstanding` that calls `then` once this pool, and whatever the caller adds, is done."""
        waiting = Outstanding(partial(self._store.calls.do, then))
        waiting.add(self)
        return waiting

    def leave(self, then: Callable[[], object]) -> None:
        with self._store.lock:
            if self._leaving is not None:
                return
            self._leaving = self._waiting(then)
            for op in [one for one in self._store.ops.values() if one.pool is self]:
                self._store.cancel(op)
            self._remove_when_returned()

    def note_returned(self, num_slots: int) -> None:
        """Note that `num_slots` slots were given back. The caller holds the store's lock."""
        self._num_lent -= num_slots
        self._remove_when_returned()

    def _remove_when_returned(self) -> None:
        if self._leaving is None or self._num_lent:
            return
        for rank, held in enumerate(self._ranks):
            for one in held.all():
                self._remove_extent(rank, one.extent.extent_id, self._leaving)
        self._leaving.done(self)


class DiskStore:
    """Blocks on the node's own disks; see `kvstow.tier.blockstore.BlockStore`. Each block is on the path that had the
    least to do when it was written."""

    name = "disk"
    answers_at_once = True

    def __init__(
        self,
        paths: Sequence[CheckedPath],
        size_bytes: int | None = None,
        writes_per_day: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`paths`: see `check_paths`. `size_bytes`: the size of each path's data file; None for the default.
        `writes_per_day`: how many bytes may be written to each path in a day; None for no bound."""
        self.clock, self.wall = clock, wall
        self.shown = ", ".join(str(one.path) for one in paths)
        self.slot_alignment = max(one.alignment for one in paths)
        self.lock = threading.Lock()
        self.calls = ActionThread("kvstow-disk-calls")
        # Under the lock:
        self.ops: dict[int, _Op] = {}
        self.writing: dict[bytes, Job] = {}
        """The jobs of blocks that are being written, or wait to be written, by digest."""
        self.extent_numbers = count(1)
        self._used = None if writes_per_day is None else UsedNames()
        self._openings = [Open(str(one.path), size_bytes) for one in paths]
        self.disks = [DiskPath(one.path, self.give_back, writes_per_day, clock, wall) for one in self._openings]
        self._channels: list[PathChannel] = []
        self._is_closed = False

    def start(self, witness: int) -> None:
        openings = zip(self._openings, self.disks, strict=True)
        self._channels = [PathChannel(opening, disk, self.lock, witness) for opening, disk in openings]

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> DiskPool:
        return DiskPool(self, layout, on_end, self.slot_alignment)

    def parts(self) -> Sequence[StorePart]:
        with self.lock:
            return [disk.part() for disk in self.disks]

    def pids(self) -> list[int | None]:
        """Return the pid of each path's process, or None for a path without one."""
        return [channel.pid for channel in self._channels]

    def close(self, seconds: float = 10.0) -> None:
        """See `BlockStore`. `seconds`: how long a process may take to sync everything."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for op in list(self.ops.values()):
                self.cancel(op)
        threads = [threading.Thread(target=channel.close, args=(seconds,)) for channel in self._channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.lock:
            for disk in self.disks:
                disk.set_state("closed", "it was closed")
        self.calls.close()

    # -- for pools and paths, with the lock held ------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[DiskPath, int] | None:
        for disk in self.disks:
            if (place := disk.place_of(digest)) is not None:
                return disk, place
        return None

    def was_used(self, digest: bytes, *, is_use: bool) -> bool:
        """Whether a block that no disk has was used before. With `is_use`, remembers this use."""
        if self._used is None:
            return False
        return self._used.note(digest) if is_use else self._used.has(digest)

    def queue_read(self, job: Job) -> DiskPath | None:
        """Queue a read. Returns the path that will read the block, or None if no path has it, so that the job has
        ended."""
        found = self.find(job.name.digest)
        if found is None:
            self.give_back((), [job])
            return None
        disk, job.place = found
        disk.read(job)
        return disk

    def queue_write(self, job: Job) -> DiskPath | None:
        """Queue a write. Returns the path that will write the block, or None if there is nothing to write or no path
        takes it, so that the job has ended."""
        if self.find(job.name.digest) is not None:
            self.give_back([job], ())
            return None
        able = [disk for disk in self.disks if disk.can_write(job.kind, was_used_again=True)]
        if not able or job.name.digest in self.writing or self._is_closed:
            self.give_back((), [job])
            return None
        disk = min(able, key=lambda one: sum(lane.all_bytes for lane in one.queue.lanes.values()))
        self.writing[job.name.digest] = job
        disk.write(job)
        return disk

    def cancel(self, op: _Op) -> None:
        waiting = [(job, disk) for job, disk in op.waiting if not job.is_over and not job.has_begun]
        for job, disk in waiting:
            disk.withdraw(job)
        self.give_back((), [job for job, _ in waiting])

    def give_back(self, good: Sequence[Job], bad: Sequence[Job]) -> None:
        """Give the slots of these jobs back to their pools. The jobs may belong to several transfers."""
        by_op: dict[int, tuple[list[int], list[int]]] = {}
        for which, jobs in enumerate((good, bad)):
            for job in jobs:
                by_op.setdefault(job.op_id, ([], []))[which].append(job.slot)
                job.is_over = True
                if self.writing.get(job.name.digest) is job:
                    del self.writing[job.name.digest]
        for op_id, slots in by_op.items():
            op, count = self.ops[op_id], sum(map(len, slots))
            op.left -= count
            if not op.left:
                del self.ops[op_id]
            self.calls.do(partial(op.pool.on_end, [Piece(op_id, *slots)]))
            op.pool.note_returned(count)

    def expect(self, num_bytes: int) -> Expectation:
        """Return how long it would take to read `num_bytes` from the paths that are on, all at the same time."""
        now, queues = self.clock(), [disk.queue for disk in self.disks if disk.is_on]
        lanes = [queue.lanes for queue in queues]
        queued = sum(one["read"].all_bytes + one["write"].under_way_bytes for one in lanes)
        rates = [rate for queue in queues if (rate := queue.read_rate(now))]
        if not rates:
            return Expectation(None, queued, 0.0)
        per_second = sum(rates) * len(queues) / len(rates)
        return Expectation((queued + num_bytes) / per_second, queued, queued / per_second)
