"""One path of the node's disks, as the service knows it: its blocks, its queue, and whether it works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

from kvstow.tier.blockstore import PartCounters, PartState, StorePart
from kvstow_api.journal import LimitedLog
from kvstow_service.stores.disk.blockfile import BlockFile, FoundFiles
from kvstow_service.stores.disk.diskformat import PlaceKind
from kvstow_service.stores.disk.diskmessages import (
    MOST_PLACES,
    MOST_USES,
    AddExtent,
    BlockAt,
    ChangeFiles,
    Direction,
    Done,
    MoveBlocks,
    RemoveExtent,
    Request,
    Result,
)
from kvstow_service.stores.disk.pathqueue import Job, Outstanding, PathQueue, UnderWay
from kvstow_service.stores.disk.places import DiskPlaces, Place, Selection
from kvstow_service.stores.disk.writebudget import WriteBudget, WrittenBytes

logger = logging.getLogger("kvstow.disk")

_CORRUPT_LINES = 10
"""How many lines a minute name corrupt blocks at most. A drive that fails has very many of them."""

STUCK_SECONDS: Final = 30.0
PROBE_SECONDS: Final = 5.0
_SYNC_SECONDS = 60.0


class Send(Protocol):
    def __call__(self, request: Request, *fds: int) -> None: ...


class _Mark(NamedTuple):
    """Places whose blocks must never be found again, and the purge that waits for this."""

    places: tuple[Place, ...]
    purge: Outstanding | None


@dataclass(slots=True)
class _Gone:
    """Removed blocks, which must never be found again. `marks`: removals that the records do not have yet. `wishes`:
    purges that wait for the files to be opened. `dirty`: places that are to be overwritten."""

    marks: list[_Mark] = field(default_factory=list)
    wishes: list[tuple[Selection, Outstanding]] = field(default_factory=list)
    dirty: list[int] = field(default_factory=list)
    is_overwriting: bool = False


class DiskPath:
    """A path of the node's disks. Used with the store's lock held. Calls are O(blocks given), except `opened` and
    `purge`, which are O(places)."""

    def __init__(
        self,
        name: str,
        give_back: Callable[[Sequence[Job], Sequence[Job]], None],
        writes_per_day: int | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`give_back`: gives the slots of these jobs back, the first ones as good ones. `clock`: seconds that never go
        back. `wall`: seconds since 1970, by which blocks are ordered."""
        self.name, self._give_back, self._clock, self._wall = name, give_back, clock, wall
        self.state: PartState = "starting"
        self.reason = "its process starts"
        self.places = DiskPlaces(0, 0)
        """Has no chunk unless the files are open."""
        self.counts = PartCounters()
        self.written = WrittenBytes(clock())
        self.budget = None if writes_per_day is None else WriteBudget(writes_per_day, clock())
        self.queue = PathQueue()
        self._send: Send
        """Sends a request to the process, which has opened the files."""
        self._corrupt_log = LimitedLog(logger, clock, burst=_CORRUPT_LINES)
        self._file_system_bytes = 0
        self._since = clock()
        """When the path got its present state, or when it was last tried."""
        self._synced_at = clock()
        self._touched: set[int] = set()
        self._gone = _Gone()
        self._extents: dict[int, tuple[int, int]] = {}
        """The descriptor and the size of each extent that a process gets. The store owns the descriptors."""
        self._leaving: dict[int, Outstanding] = {}

    # -- blocks ---------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self.state == "on"

    @property
    def is_open(self) -> bool:
        return self.places.size_bytes > 0

    def place_of(self, digest: bytes) -> int | None:
        return self.places.index.get(digest) if self.is_on else None

    def use(self, place: int) -> None:
        self.places.use(place, self._wall())
        self._touched.add(self.places.where(place).chunk)

    def can_write(self, kind: PlaceKind, *, was_used_again: bool) -> bool:
        if not self.is_on or not self.places.fits(kind):
            return False
        return self.budget is None or self.budget.allows(
            kind.owner, kind.place_bytes, was_used_again=was_used_again, now=self._clock()
        )

    def read(self, job: Job) -> None:
        """Queue a read of the block in `job.place`."""
        self.places.hold(job.place)
        self.queue.lanes["read"].add(job)

    def write(self, job: Job) -> None:
        if self.budget is not None:
            self.budget.spend(job.kind.owner, job.kind.place_bytes)
        self.queue.lanes["write"].add(job)

    def withdraw(self, job: Job) -> None:
        """End a job that has not begun. The caller gives it back."""
        self.queue.lanes[job.direction].withdraw(job)
        if job.direction == "read":
            self._let_go(job.place)

    def pump(self) -> None:
        """Begin all jobs that may begin now."""
        if not self.is_on:
            return
        for direction in self.queue.lanes:
            while jobs := self.queue.next(direction, self._can_begin):
                self._begin(direction, jobs)
        if self._gone.dirty and not self._gone.is_overwriting:
            self._overwrite()

    def _begin(self, direction: Direction, jobs: tuple[Job, ...]) -> None:
        blocks = tuple(BlockAt(self.places.where(job.place), job.name, job.parts) for job in jobs)
        self.queue.begin(direction, jobs)
        self._ask(MoveBlocks(next(self.queue.numbers), direction, blocks), self._take_results, jobs)

    def _can_begin(self, job: Job) -> bool:
        """Give a write its place. Returns False if it has none yet, or was refused."""
        if job.direction == "read":
            return True
        taken = self.places.take(job.kind, self._wall())
        self.counts.evicted_blocks += taken.num_evicted
        if taken.assign is not None:
            self._change(BlockFile.assign, taken.assign, then=partial(self.places.assigned, taken.assign.chunk))
        if taken.place is not None:
            job.place = taken.place
        elif not taken.waits:
            self.queue.lanes["write"].withdraw(job)
            self.counts.refused_blocks += 1
            self._give_back((), [job])
        return taken.place is not None

    # -- answers --------------------------------------------------------------------------------------------

    def done(self, answer: Done) -> None:
        """Take the child's answer to a request."""
        done = self.queue.under_way.pop(answer.number)
        done.take(answer, done)
        if answer.error:
            self.set_state("failed", answer.error)
            self._empty_queue()
        elif self.state == "stuck" and not self._is_overdue():
            self.set_state("on", "")
        self.pump()

    def _take_results(self, answer: Done, done: UnderWay) -> None:
        direction, results = done.jobs[0].direction, list(zip(done.jobs, answer.results, strict=True))
        self.queue.end(direction, done, self._clock(), is_good=not answer.error)
        corrupt = [self.places.where(job.place) for job, result in results if result == "corrupt"]
        if corrupt:
            self.counts.corrupt_blocks += len(corrupt)
            where = ", ".join(f"{one.number} of chunk {one.chunk}" for one in corrupt)
            self._corrupt_log.log(logging.ERROR, "blocks on disk %s are corrupt: places %s", self.name, where)
        self.counts.failed_blocks += answer.results.count("failed")
        take = self._take_read if direction == "read" else self._take_write
        good = [job for job, result in results if take(job, result)]
        self._give_back(good, [job for job in done.jobs if job not in good])

    def _take_read(self, job: Job, result: Result) -> bool:
        """Returns whether the block was read."""
        if result == "read":
            self.counts.read_blocks += 1
            self.counts.read_bytes += job.kind.place_bytes
        elif result != "failed" and self.places.index.get(job.name.digest) == job.place:
            self.places.remove(job.place)  # a purge or another read has not removed it yet
            self._mark([job.place], None)
        self._let_go(job.place)
        return result == "read"

    def _take_write(self, job: Job, result: Result) -> bool:
        """Returns whether the block was written."""
        if result == "written" and not job.is_purged:
            self.places.publish(job.place, job.name, self._wall())
            self.counts.written_blocks += 1
            self.counts.written_bytes += job.kind.place_bytes
            self.written.note(job.kind.place_bytes, self._clock())
            return True
        self.places.abandon(job.place)
        if result == "written":  # its record is valid, so it must be marked
            self._mark([job.place], job.purge)
        else:
            self._let_go(job.place)
        if job.purge is not None:
            job.purge.done(self)
        return False

    def _let_go(self, place: int) -> None:
        if self.places.let_go(place):
            self._gone.dirty.append(place)

    # -- removed blocks ---------------------------------------------------------------------------------------

    def purge(self, selection: Selection, purge: Outstanding | None) -> int | None:
        """Remove the selected blocks, and return how many there are; None while the files are not open. `purge`: waits
        for their removal; if None, the blocks are only counted."""
        chosen = self.places.select(selection) if self.is_open else []
        if purge is not None:
            if not self.is_open:
                purge.add(self)
                self._gone.wishes.append((selection, purge))
            self._purge_writes(selection, purge)
            for place in chosen:
                self.places.remove(place)
            if chosen:
                self._mark(chosen, purge)
            self._answer_purges()
        return len(chosen) if self.is_open else None

    def purge_notice(self, count: int | None) -> str:
        """Return a sentence that says what a purge leaves in the files for now; empty if it leaves nothing. `count`:
        what `purge` has returned."""
        undoes_writes = any(job.is_purged for job in self.queue.jobs_under_way)
        if self.state in ("on", "starting") or (count == 0 and not undoes_writes):
            return ""
        what = "what was chosen" if not count else "1 block" if count == 1 else f"{count:,} blocks"
        return (
            f"disk {self.name} is {self.state} ({self.reason}) and keeps {what} in its files. No request finds that "
            "now, and it is removed when the disk works again; if the service restarts before, purge the pool again"
        )

    def _purge_writes(self, selection: Selection, purge: Outstanding) -> None:
        """Keep the selected blocks that are being written from becoming visible."""
        lane = self.queue.lanes["write"]
        waiting = [job for job in lane.jobs() if selection.takes_write(job.kind, job.name, job.key)]
        for job in waiting:
            lane.withdraw(job)
        self._give_back((), waiting)
        for job in self.queue.jobs_under_way:
            is_write = job.direction == "write" and not job.is_purged
            if is_write and selection.takes_write(job.kind, job.name, job.key):
                job.is_purged, job.purge = True, purge
                purge.add(self)

    def _answer_purges(self) -> None:
        """Let no purge wait for a disk that does not work."""
        if self.state in ("on", "starting"):
            return
        waiting = [purge for _, purge in self._gone.wishes]
        waiting += [mark.purge for mark in self._gone.marks if mark.purge is not None]
        waiting += [job.purge for job in self.queue.jobs_under_way if job.purge is not None]
        for purge in waiting:
            purge.give_up(self)

    def _mark(self, places: Sequence[int], purge: Outstanding | None) -> None:
        """Let the records of removed blocks say so, and then let the places go, which are held until then."""
        for at in range(0, len(places) or 1, MOST_PLACES):
            some = places[at : at + MOST_PLACES]
            mark = _Mark(tuple(map(self.places.where, some)), purge)
            if purge is not None:
                purge.add(self)
            self._gone.marks.append(mark)
            self._change(BlockFile.mark_dirty, mark.places, then=partial(self._note_marked, mark, some))

    def _note_marked(self, mark: _Mark, places: Iterable[int]) -> None:
        self._gone.marks.remove(mark)
        for place in places:
            self._let_go(place)
        if mark.purge is not None:
            mark.purge.done(self)

    def _overwrite(self) -> None:
        """Overwrite some of the dirty places, all of one length."""
        dirty = self._gone.dirty
        size = self.places.kind_of(dirty[-1]).place_bytes
        chosen: list[int] = []
        while dirty and len(chosen) < MOST_PLACES and self.places.kind_of(dirty[-1]).place_bytes == size:
            chosen.append(dirty.pop())
        self._gone.is_overwriting = True
        where, then = [self.places.where(place) for place in chosen], partial(self._note_overwritten, chosen)
        self._change(BlockFile.overwrite, where, size, then=then, kind="other")

    def _note_overwritten(self, places: Iterable[int]) -> None:
        self._gone.is_overwriting = False
        for place in places:
            self.places.clean(place)

    # -- memory ---------------------------------------------------------------------------------------------

    def add_extent(self, number: int, fd: int, num_bytes: int) -> None:
        """Let each process of the path map an extent, until `remove_extent`. The caller keeps `fd`."""
        self._extents[number] = fd, num_bytes
        if self.is_open:
            self._send(AddExtent(number, num_bytes), fd)

    def remove_extent(self, number: int, waiting: Outstanding) -> None:
        """Let the process unmap an extent. `waiting` waits for that."""
        del self._extents[number]
        if self.is_open:
            waiting.add(self)
            self._leaving[number] = waiting
            request = RemoveExtent(next(self.queue.numbers), number)
            self._ask(request, lambda answer, done: self._leaving.pop(number).done(self))

    # -- its process ----------------------------------------------------------------------------------------

    def opened(self, found: FoundFiles, file_system_bytes: int, send: Send) -> None:
        header, self._send = found.header, send
        self.places = DiskPlaces(header.num_chunks, header.chunk_bytes)
        self._file_system_bytes = file_system_bytes
        dirty = self.places.restore(found.chunks, {chunk: one.generation for chunk, one in header.chunks.items()})
        before, self._gone = self._gone, _Gone(dirty=dirty)
        self.set_state("on", "")
        for number, (fd, num_bytes) in self._extents.items():
            self._send(AddExtent(number, num_bytes), fd)
        for mark in before.marks:  # the former process may have ended before it has written them
            places = [place for where in mark.places if (place := self.places.cached_at(where)) is not None]
            for place in places:
                self.places.remove(place)
            self._mark(places, mark.purge)  # records that are dirty already only need to be synced
            if mark.purge is not None:
                mark.purge.done(self)
        for selection, purge in before.wishes:
            self.purge(selection, purge)
            purge.done(self)
        self.pump()

    def ended(self, reason: str) -> None:
        """Give all slots back, because the path's process has ended and does not touch them any more."""
        self.counts.restarts += 1
        under_way = self.queue.jobs_under_way
        for job in under_way:
            if job.is_purged:  # its record may be valid
                self._gone.marks.append(_Mark((self.places.where(job.place),), job.purge))
        waiting = [job for lane in self.queue.lanes.values() for job in lane.drain()]
        self.places, self.queue = DiskPlaces(0, 0), PathQueue()
        self.set_state("starting", reason)
        self._fail([*under_way, *waiting])
        leaving, self._leaving = self._leaving, {}
        for unmapped in leaving.values():
            unmapped.give_up(self)

    def tick(self) -> None:
        """Look for operations that are overdue, try a failed disk again, and write the times of use and sync now and
        then."""
        now = self._clock()
        if self.state == "starting" and now - self._since > STUCK_SECONDS:
            self.set_state("stuck", f"its files did not open within {STUCK_SECONDS:.0f} s")
        if self.is_on and self._is_overdue():
            self.counts.timeouts += 1
            self.set_state("stuck", f"an operation has taken more than {STUCK_SECONDS:.0f} s")
            self._empty_queue()
        if self.state == "failed" and self.is_open and now - self._since >= PROBE_SECONDS:
            self._since = now
            self._try(BlockFile.probe, then=lambda: self.set_state("on", ""))
        if self.is_on and now - self._synced_at >= _SYNC_SECONDS:
            self._synced_at = now
            self._write_uses()
            self._try(BlockFile.sync, kind="other")
        self.pump()

    def _is_overdue(self) -> bool:
        oldest = next(iter(self.queue.under_way.values()), None)
        return oldest is not None and self._clock() - oldest.began > STUCK_SECONDS

    def _write_uses(self) -> None:
        touched, self._touched = self._touched, set()
        for chunk in touched:
            times = self.places.uses_of(chunk)
            for first in range(0, len(times), MOST_USES):
                some = times[first : first + MOST_USES].tobytes()
                self._try(BlockFile.write_uses, chunk, first, some, kind="other")

    def _empty_queue(self) -> None:
        """Let no read or write wait for a disk that does not work."""
        for direction, lane in self.queue.lanes.items():
            jobs = lane.drain()
            if direction == "read":
                for job in jobs:
                    self._let_go(job.place)
            self._fail(jobs)

    def _fail(self, jobs: Sequence[Job]) -> None:
        self.counts.failed_blocks += len(jobs)
        self._give_back((), jobs)

    def set_state(self, state: PartState, reason: str) -> None:
        if state != self.state:
            self._since = self._clock()
            log = logger.info if state in ("on", "starting", "closed") else logger.warning
            log("disk %s: %s%s", self.name, state, f" ({reason})" if reason else "")
        self.state, self.reason = state, reason
        self._answer_purges()
        if state == "on":
            again, self.queue.again = self.queue.again, []
            for change in again:
                change()

    def _change(
        self,
        method: Callable[..., None],
        *arguments: Any,
        then: Callable[[], None],
        kind: Literal["awaited", "other"] = "awaited",
    ) -> None:
        """Let the process change the files, if need be when the disk works again. `then` is called when it was done."""
        again = partial(self._change, method, *arguments, then=then, kind=kind)
        if self.state == "failed":
            self.queue.again.append(again)
        else:
            self._try(method, *arguments, then=then, or_else=lambda: self.queue.again.append(again), kind=kind)

    def _try(
        self,
        method: Callable[..., None],
        *arguments: Any,
        then: Callable[[], None] = lambda: None,
        or_else: Callable[[], None] = lambda: None,
        kind: Literal["awaited", "other"] = "awaited",
    ) -> None:
        request = ChangeFiles(next(self.queue.numbers), kind, method, arguments)
        self._ask(request, lambda answer, done: or_else() if answer.error else then())

    def _ask(
        self,
        request: MoveBlocks | ChangeFiles | RemoveExtent,
        take: Callable[[Done, UnderWay], None],
        jobs: tuple[Job, ...] = (),
    ) -> None:
        self.queue.under_way[request.number] = UnderWay(self._clock(), jobs, take)
        self._send(request)

    # -- operators ------------------------------------------------------------------------------------------

    def part(self) -> StorePart:
        now, places, lanes, is_open = self._clock(), self.places, self.queue.lanes, self.is_open
        overdue = [done for done in self.queue.under_way.values() if now - done.began > STUCK_SECONDS]
        per_day = self.written.per_day(now)
        has_wear = per_day is not None and self._file_system_bytes
        return StorePart(
            name=self.name,
            state=self.state,
            reason=self.reason,
            counters=replace(self.counts),
            blocks=len(places.index) if is_open else None,
            size_bytes=places.size_bytes if is_open else None,
            used_bytes=places.used_bytes if is_open else None,
            queued_read_bytes=lanes["read"].all_bytes,
            queued_write_bytes=lanes["write"].all_bytes,
            read_bytes_per_second=lanes["read"].rate.per_second,
            write_bytes_per_second=lanes["write"].rate.per_second,
            written_bytes_today=self.written.today(now),
            write_budget_bytes=None if self.budget is None else self.budget.bytes_per_day,
            drive_writes_per_day=(per_day or 0.0) / self._file_system_bytes if has_wear else None,
            stuck_slots=sum(len(done.jobs) for done in overdue),
        )
