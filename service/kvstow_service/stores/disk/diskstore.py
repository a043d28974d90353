"""Blocks on the node's own disks: see `kvstow.tier.blockstore.BlockStore`."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvstow.tier.blockstore import (
    BlockTransfer,
    Expectation,
    Fate,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StoredNamespace,
    StorePart,
)
from kvstow_service.stores.actionthread import ActionThread
from kvstow_service.stores.disk.blockfile import FoundFiles
from kvstow_service.stores.disk.diskformat import digest_of, name_digests, padded
from kvstow_service.stores.disk.diskmessages import AddExtent, Done, Open, PartAt, Problem, RemoveExtent, Request
from kvstow_service.stores.disk.diskpath import DiskPath, Selection
from kvstow_service.stores.disk.pathchannel import PathChannel
from kvstow_service.stores.disk.pathqueue import Job, NamespaceName, PurgeTicket
from kvstow_service.stores.disk.places import PlaceKind
from kvstow_service.stores.disk.startcheck import CheckedPath
from kvstow_service.stores.disk.writebudget import UsedNames

_REMEMBERED_PLACES = 1 << 18
"""How many blocks that the disks lack have their uses remembered, in 4 MiB."""


@dataclass(slots=True)
class _Extent:
    """An extent of a pool. `number`: its name in all child processes. `fd`: a duplicate, for processes that start
    later. `leaving`: how many processes still have it after it was removed, and `on_left`: calls to make when none has
    it any more."""

    number: int
    extent: StoredExtent
    fd: int
    leaving: int = 0
    on_left: list[Callable[[], object]] = field(default_factory=list)


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

    def find(self, slot: int) -> _Extent | None:
        at = bisect_right(self._firsts, slot) - 1
        if at < 0 or slot >= self._firsts[at] + self._extents[at].extent.num_slots:
            return None
        return self._extents[at]

    def all(self) -> list[_Extent]:
        return list(self._extents)


class _Path:
    """A path with its process. It is the host of the `DiskPath` and the user of the `PathChannel`."""

    def __init__(self, store: DiskStore, checked: CheckedPath, size_bytes: int | None, writes: int | None) -> None:
        self._store = store
        self._opening = Open(str(checked.path), size_bytes)
        self.disk = DiskPath(str(checked.path), self, writes, store.clock, store.wall)
        self._channel: PathChannel | None = None
        self._is_open = False
        self._removing: dict[int, _Extent] = {}

    def start(self, witness: int) -> None:
        self._channel = PathChannel(self._opening, self, witness)

    def close(self, seconds: float) -> None:
        if self._channel is not None:
            self._channel.close(seconds)

    @property
    def pid(self) -> int | None:
        return None if self._channel is None else self._channel.pid

    # -- memory, with the store's lock held -----------------------------------------------------------------

    def add_extent(self, one: _Extent) -> None:
        if self._is_open:
            self._send(AddExtent(one.number, one.extent.num_bytes), one.fd)

    def remove_extent(self, one: _Extent) -> bool:
        """Let the process unmap the extent. Returns whether the process has it, and so will answer when it is
        unmapped."""
        if self._is_open:
            number = -one.number
            self._removing[number] = one
            self._send(RemoveExtent(number, one.number))
        return self._is_open

    def _note_left(self, one: _Extent) -> None:
        one.leaving -= 1
        if not one.leaving:
            for call in one.on_left:
                self._store.calls.do(call)

    def _send(self, request: Request, fd: int | None = None) -> None:
        assert self._channel is not None
        self._channel.send(request, fd)

    # -- see `PathHost` -------------------------------------------------------------------------------------

    def parts_of(self, job: Job) -> tuple[PartAt, ...] | None:
        return self._store.parts_of(job.op_id, job.slot)

    def give_back(self, jobs: Sequence[Job], fate: Fate | None, error: str = "") -> None:
        self._store.give_back(jobs, fate, error)

    def send(self, request: Request) -> None:
        self._send(request)

    def send_extents(self) -> None:
        self._is_open = True
        for one in self._store.extents():
            self.add_extent(one)

    # -- see `PathUser` -------------------------------------------------------------------------------------

    def opened(self, found: FoundFiles, file_system_bytes: int) -> None:
        with self._store.lock:
            self.disk.opened(found, file_system_bytes)

    def has_problem(self, problem: Problem) -> None:
        with self._store.lock:
            self.disk.has_problem(problem)

    def done(self, answer: Done) -> None:
        with self._store.lock:
            if (one := self._removing.pop(answer.number, None)) is not None:
                self._note_left(one)
            else:
                self.disk.done(answer)

    def ended(self, reason: str) -> None:
        with self._store.lock:
            self._is_open = False
            removing, self._removing = self._removing, {}
            for one in removing.values():
                self._note_left(one)
            self.disk.ended(reason)

    def tick(self) -> None:
        with self._store.lock:
            self.disk.tick()


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
        self._store, self.layout, self.on_end = store, layout, on_end
        self._padded = padded(layout.slot_bytes, alignment)
        self.kind = PlaceKind(layout.owner, sum(self._padded))
        self._identity = digest_of(layout.identity)
        self._names: dict[str, NamespaceName] = {}
        self.ranks = [_RankExtents() for _ in layout.slot_bytes]
        self.num_lent = 0
        self._has_left = False
        self._on_left: list[Callable[[], object]] = []

    # -- what the store has ---------------------------------------------------------------------------------

    def has(
        self, namespace: StoredNamespace, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool]:
        if self._has_left:
            return [False] * len(keys)
        digests = name_digests(self._name(namespace).fingerprint, keys)
        with self._store.lock:
            indexes = [disk.places.index for disk in self._store.disks if disk.is_on and disk.places is not None]
            if len(indexes) == 1:
                return list(map(indexes[0].__contains__, digests))
            return [any(digest in index for index in indexes) for digest in digests]

    def offer(self, namespace: StoredNamespace, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        if self._has_left:
            return []
        digests = name_digests(self._name(namespace).fingerprint, keys)
        store, wanted = self._store, list[int]()
        with store.lock:
            may_write = [
                any(disk.can_write(self.kind, was_used_again=is_again) for disk in store.disks)
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
            return self._store.expect(num_blocks * self.kind.place_bytes)

    # -- transfers ------------------------------------------------------------------------------------------

    def read(self, batch: BlockTransfer) -> None:
        self._begin(batch, is_read=True)

    def write(self, batch: BlockTransfer) -> None:
        self._begin(batch, is_read=False)

    def _begin(self, batch: BlockTransfer, *, is_read: bool) -> None:
        name, store = self._name(batch.namespace), self._store
        digests = name_digests(name.fingerprint, batch.keys)
        jobs = [
            Job(batch.op_id, is_read, name, key, digest, slot, self.kind)
            for key, digest, slot in zip(batch.keys, digests, batch.slots, strict=True)
        ]
        if not jobs:
            return
        with store.lock:
            store.ops[batch.op_id] = op = _Op(self, len(jobs))
            self.num_lent += len(jobs)
            if self._has_left:
                store.give_back(jobs, "cancelled")
                return
            lost = [job for job in jobs if store.parts_of(job.op_id, job.slot) is None]
            if lost:
                store.give_back(lost, "failed", "the disks do not have the memory of this slot")
            queue = store.queue_read if is_read else store.queue_write
            for job in jobs:
                if job not in lost and (disk := queue(job)) is not None:
                    op.waiting.append((job, disk))
            for disk in store.disks:
                disk.pump()

    def cancel(self, op_id: int) -> None:
        store = self._store
        with store.lock:
            if (op := store.ops.get(op_id)) is not None and op.pool is self:
                store.cancel(op)

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        store = self._store
        with store.lock:
            selection = self._selection(wish, store.wall())
            chosen: list[tuple[DiskPath, int | None]] = []

            def end() -> None:
                notices = [notice for disk, count in chosen if (notice := disk.purge_notice(count))]
                result = Purged(sum(count or 0 for _, count in chosen), "; ".join(notices))
                store.calls.do(lambda: then(result))

            ticket = PurgeTicket(end)
            chosen += [(disk, disk.purge(selection, None if dry_run else ticket)) for disk in store.disks]
            ticket.done()

    def _selection(self, wish: PurgeWish, now: float) -> Selection:
        ages = Selection(
            written_before=None if wish.age_seconds is None else now - wish.age_seconds,
            used_before=None if wish.idle_seconds is None else now - wish.idle_seconds,
        )
        if wish.keys is not None:
            return ages._replace(identity=self._identity, keys=frozenset(wish.keys))
        if wish.namespace is not None:
            return ages._replace(fingerprints=frozenset([self._name(wish.namespace).fingerprint]))
        return ages._replace(identity=self._identity, prefixes=wish.key_prefixes or ())

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
            elif not self._has_left:
                one = _Extent(next(store.extent_numbers), extent, os.dup(fd))
                self.ranks[rank].add(one)
                for path in store.paths:
                    path.add_extent(one)
            store.calls.do(lambda: then(problem))

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        with self._store.lock:
            self._remove_extent(rank, extent_id, then)

    def _remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        one = self.ranks[rank].remove(extent_id)
        if one is None:
            self._store.calls.do(then)
            return
        os.close(one.fd)
        one.leaving = sum([path.remove_extent(one) for path in self._store.paths])
        if one.leaving:
            one.on_left.append(then)
        else:
            self._store.calls.do(then)

    def leave(self, then: Callable[[], object]) -> None:
        with self._store.lock:
            if self._has_left:
                return
            self._has_left = True
            self._on_left.append(then)
            for op in [one for one in self._store.ops.values() if one.pool is self]:
                self._store.cancel(op)
            self.note_returned(0)

    def note_returned(self, num_slots: int) -> None:
        """Note that `num_slots` slots were given back. The caller holds the store's lock."""
        self.num_lent -= num_slots
        if not self._has_left or self.num_lent or not self._on_left:
            return
        (then,), self._on_left = self._on_left, []
        extents = [(rank, one.extent.extent_id) for rank, held in enumerate(self.ranks) for one in held.all()]
        left = [len(extents) + 1]

        def note() -> None:
            with self._store.lock:
                left[0] -= 1
                if left[0]:
                    return
                self._store.pools.remove(self)
            then()

        for rank, extent_id in extents:
            self._remove_extent(rank, extent_id, note)
        self._store.calls.do(note)

    def _name(self, namespace: StoredNamespace) -> NamespaceName:
        found = self._names.get(namespace.fingerprint)
        if found is None:
            fingerprint = digest_of(namespace.fingerprint)
            found = NamespaceName(fingerprint, self._identity, self.layout.owner, namespace.label)
            self._names[namespace.fingerprint] = found
        return found


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
        self.pools: list[DiskPool] = []
        self.ops: dict[int, _Op] = {}
        self.writing: Counter[bytes] = Counter()
        """Digests of blocks that are being written, or wait to be written."""
        self.extent_numbers = count(1)
        self._used = None if writes_per_day is None else UsedNames(_REMEMBERED_PLACES)
        self.paths = [_Path(self, one, size_bytes, writes_per_day) for one in paths]
        self.disks = [path.disk for path in self.paths]
        self._is_closed = False

    def start(self, witness: int) -> None:
        for path in self.paths:
            path.start(witness)

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> DiskPool:
        pool = DiskPool(self, layout, on_end, self.slot_alignment)
        with self.lock:
            self.pools.append(pool)
        return pool

    def parts(self) -> Sequence[StorePart]:
        with self.lock:
            return [disk.part() for disk in self.disks]

    def pids(self) -> list[int | None]:
        """Return the pid of each path's process, or None for a path without one."""
        return [path.pid for path in self.paths]

    def close(self, seconds: float = 10.0) -> None:
        """See `BlockStore`. `seconds`: how long a process may take to sync everything."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for op in list(self.ops.values()):
                self.cancel(op)
        threads = [threading.Thread(target=path.close, args=(seconds,)) for path in self.paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.lock:
            for disk in self.disks:
                disk.state, disk.reason = "closed", "it was closed"
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
        found = self.find(job.digest)
        if found is None:
            self.give_back([job], "missing")
            return None
        disk, job.place = found
        disk.read(job)
        return disk

    def queue_write(self, job: Job) -> DiskPath | None:
        if self.find(job.digest) is not None:
            self.give_back([job], None)
            return None
        able = [disk for disk in self.disks if disk.can_write(job.kind, was_used_again=True)]
        if not able or job.digest in self.writing or self._is_closed:
            self.give_back([job], "refused", "no disk takes it now")
            return None
        disk = min(able, key=lambda one: sum(lane.all_bytes for lane in one.queue.lanes.values()))
        self.writing[job.digest] += 1
        job.is_counted = True
        disk.write(job)
        return disk

    def cancel(self, op: _Op) -> None:
        ended = []
        for job, disk in op.waiting:
            if not job.is_over and not job.has_begun:
                disk.withdraw("read" if job.is_read else "write", job)
                ended.append(job)
        op.waiting.clear()
        if ended:
            self.give_back(ended, "cancelled")

    def give_back(self, jobs: Sequence[Job], fate: Fate | None, error: str = "") -> None:
        """Give the slots of these jobs back to their pools, as good ones if `fate` is None. The jobs may belong to
        several transfers."""
        by_op: dict[int, list[Job]] = {}
        for job in jobs:
            by_op.setdefault(job.op_id, []).append(job)
            job.is_over = True
            if job.is_counted:
                job.is_counted = False
                self.writing[job.digest] -= 1
                if not self.writing[job.digest]:
                    del self.writing[job.digest]
        for op_id, ended in by_op.items():
            op = self.ops[op_id]
            op.left -= len(ended)
            if not op.left:
                del self.ops[op_id]
            slots = [job.slot for job in ended]
            piece = Piece(op_id, slots) if fate is None else Piece(op_id, (), slots, fate, error)
            self.calls.do(partial(op.pool.on_end, [piece]))
            op.pool.note_returned(len(ended))

    def parts_of(self, op_id: int, slot: int) -> tuple[PartAt, ...] | None:
        """Return where a slot of a transfer is in the memory of all ranks; None if it is in no extent of the store."""
        pool = self.ops[op_id].pool
        found: list[PartAt] = []
        for held, num_bytes in zip(pool.ranks, pool.layout.slot_bytes, strict=True):
            one = held.find(slot)
            if one is None:
                return None
            found.append(PartAt(one.number, (slot - one.extent.first_slot) * one.extent.slot_stride, num_bytes))
        return tuple(found)

    def extents(self) -> list[_Extent]:
        return [one for pool in self.pools for held in pool.ranks for one in held.all()]

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
