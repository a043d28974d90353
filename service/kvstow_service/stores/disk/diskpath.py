"""One path of the node's disks, as the service knows it: its blocks, its queue, and whether it works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from kvstow.tier.blockstore import Fate, PartCounters, PartState, StorePart
from kvstow_api.journal import LimitedLog
from kvstow_service.stores.disk.blockfile import FoundFiles
from kvstow_service.stores.disk.diskformat import MOST_NAMESPACES, NamespaceEntry, name_digests
from kvstow_service.stores.disk.diskmessages import (
    MOST_PLACES,
    MOST_USES,
    AddNamespace,
    Assign,
    BlockAt,
    Done,
    MarkDirty,
    MoveBlocks,
    Overwrite,
    PartAt,
    ProbeFiles,
    Problem,
    Request,
    Result,
    Sync,
    WriteUses,
)
from kvstow_service.stores.disk.pathqueue import Direction, Job, PathQueue, PurgeTicket, UnderWay
from kvstow_service.stores.disk.places import BlockName, DiskPlaces, Place, PlaceKind
from kvstow_service.stores.disk.writebudget import WriteBudget, WrittenBytes

logger = logging.getLogger("kvstow.disk")

_CORRUPT_LINES = 10
"""How many lines a minute name corrupt blocks at most. A drive that fails has very many of them."""

STUCK_SECONDS: Final = 30.0
PROBE_SECONDS: Final = 5.0
_SYNC_SECONDS = 60.0


class Selection(NamedTuple):
    """The blocks that a purge removes. They belong to a namespace with one of the `fingerprints`, or with this
    `identity`. Unless `keys` is None, only these keys are removed. If there are `prefixes`, only keys that begin with
    one of them are. If a time is given, only blocks that were written, or last used, before it are removed."""

    fingerprints: frozenset[bytes] = frozenset()
    identity: bytes | None = None
    keys: frozenset[bytes] | None = None
    prefixes: tuple[bytes, ...] = ()
    written_before: float | None = None
    used_before: float | None = None

    @property
    def has_age(self) -> bool:
        return self.written_before is not None or self.used_before is not None

    def takes_job(self, job: Job) -> bool:
        """Whether the purge removes the block of this job, which is being written and so is younger than any age."""
        if self.has_age or (job.name.fingerprint not in self.fingerprints and job.name.identity != self.identity):
            return False
        if self.keys is not None:
            return job.key in self.keys
        return not self.prefixes or job.key.startswith(self.prefixes)


@dataclass(slots=True, eq=False)
class _Mark:
    """Places whose blocks must never be found again, the numbers of these places, and the purge that waits for this."""

    places: list[Place]
    numbers: list[int]
    ticket: PurgeTicket | None


@dataclass(slots=True, eq=False)
class _Wish:
    """A purge before the files were opened. `ticket`: the caller that waits for it, if one does."""

    selection: Selection
    ticket: PurgeTicket | None


@dataclass(slots=True)
class _Gone:
    """Removed blocks, which must never be found again. `marks`: removals that the records do not have yet. `marked`:
    the numbers of the places in `marks`. `wishes`: purges that wait for the files to be opened. `dirty`: places that
    are to be overwritten."""

    marks: list[_Mark] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    wishes: list[_Wish] = field(default_factory=list)
    dirty: list[int] = field(default_factory=list)
    is_overwriting: bool = False


class PathHost(Protocol):
    """What the path's owner does for the path. All calls are made with the store's lock held."""

    def parts_of(self, job: Job) -> tuple[PartAt, ...] | None:
        """Return where the job's slot is in memory; None if the pool has lost it."""

    def give_back(self, jobs: Sequence[Job], fate: Fate | None, error: str = "") -> None:
        """Give the slots of these jobs back, as good ones if `fate` is None."""

    def send(self, request: Request) -> None:
        """Send a request to the path's child process."""

    def send_extents(self) -> None:
        """Send all extents to a new child process that has opened the files."""


class _Namespaces:
    """The path's table of namespaces, by row."""

    def __init__(self, found: dict[int, NamespaceEntry]) -> None:
        self.rows = found
        self.of_fingerprint = {entry.fingerprint: entry for entry in found.values()}
        self.is_written = {entry.number for entry in found.values()}
        self._next_number = max((entry.number for entry in found.values()), default=0) + 1

    def add(
        self, fingerprint: bytes, identity: bytes, owner: str, label: str, used: Callable[[], set[int]]
    ) -> tuple[int, NamespaceEntry] | None:
        """Add an entry, and return its row and the entry; None if all rows are in use. `used`: returns the numbers of
        namespaces in use."""
        row = next((row for row in range(MOST_NAMESPACES) if row not in self.rows), None)
        if row is None:
            kept = used()
            row = next((row for row, entry in self.rows.items() if entry.number not in kept), None)
            if row is None:
                return None
            del self.of_fingerprint[self.rows[row].fingerprint]
        entry = NamespaceEntry(self._next_number, fingerprint, identity, owner, label)
        self._next_number += 1
        self.rows[row] = self.of_fingerprint[fingerprint] = entry
        return row, entry

    def numbers_for(self, selection: Selection) -> list[int]:
        return [entry.number for entry in self._entries_for(selection)]

    def fingerprints_for(self, selection: Selection) -> list[bytes]:
        return [entry.fingerprint for entry in self._entries_for(selection)]

    def _entries_for(self, selection: Selection) -> list[NamespaceEntry]:
        return [
            entry
            for entry in self.rows.values()
            if entry.fingerprint in selection.fingerprints or entry.identity == selection.identity
        ]


class DiskPath:
    """A path of the node's disks. Used with the store's lock held. Calls are O(blocks given), except `opened` and
    `purge`, which are O(places)."""

    def __init__(
        self,
        name: str,
        host: PathHost,
        writes_per_day: int | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`clock`: seconds that never go back. `wall`: seconds since 1970, by which blocks are ordered."""
        self.name, self._host, self._clock, self._wall = name, host, clock, wall
        self.state: PartState = "starting"
        self.reason = "its process starts"
        self.places: DiskPlaces | None = None
        self.counts = PartCounters()
        self.written = WrittenBytes(clock())
        self.budget = None if writes_per_day is None else WriteBudget(writes_per_day, clock())
        self.queue = PathQueue()
        self._corrupt_log = LimitedLog(logger, clock, burst=_CORRUPT_LINES)
        self._namespaces = _Namespaces({})
        self._file_system_bytes = 0
        self._next_number = 1
        self._since = clock()
        """When the path got its present state, or when it was last tried."""
        self._synced_at = clock()
        self._touched: set[int] = set()
        self._gone = _Gone()
        self._again: list[tuple[Any, Callable[[], None]]] = []
        """Requests that have failed. They are repeated when the disk works again."""

    # -- blocks ---------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self.state == "on"

    def place_of(self, digest: bytes) -> int | None:
        return self.places.index.get(digest) if self.places is not None and self.state == "on" else None

    def use(self, place: int) -> None:
        assert self.places is not None
        self.places.use(place, self._wall())
        self._touched.add(self.places.where(place).chunk)

    def can_write(self, kind: PlaceKind, *, was_used_again: bool) -> bool:
        if self.places is None or not self.is_on or not self.places.fits(kind):
            return False
        return self.budget is None or self.budget.allows(
            kind.owner, kind.place_bytes, was_used_again=was_used_again, now=self._clock()
        )

    def read(self, job: Job) -> None:
        """Queue a read of the block in `job.place`."""
        assert self.places is not None
        assert job.place is not None
        self.places.hold(job.place)
        self.queue.lanes["read"].add(job)

    def write(self, job: Job) -> None:
        if self.budget is not None:
            self.budget.spend(job.kind.owner, job.kind.place_bytes)
        self.queue.lanes["write"].add(job)

    def withdraw(self, direction: Direction, job: Job) -> None:
        """End a job that has not begun. The caller gives it back."""
        self.queue.lanes[direction].withdraw(job)
        if direction == "read":
            self._let_go(job)

    def pump(self) -> None:
        """Begin all jobs that may begin now."""
        if not self.is_on:
            return
        for direction in ("read", "write"):
            while jobs := self.queue.next(direction, self._can_begin if direction == "write" else lambda job: True):
                self._begin(direction, jobs)
        if self._gone.dirty and not self._gone.is_overwriting:
            self._overwrite()

    def _begin(self, direction: Direction, jobs: Sequence[Job]) -> None:
        assert self.places is not None
        blocks: list[BlockAt] = []
        for job in jobs:
            assert job.place is not None
            parts = self._host.parts_of(job)
            assert parts is not None
            blocks.append(BlockAt(self.places.where(job.place), self._name_of(job), parts))
        number = self._number()
        self.queue.begin(number, direction, tuple(jobs), self._clock())
        self._host.send(MoveBlocks(number, direction, tuple(blocks)))

    def _name_of(self, job: Job) -> BlockName:
        entry = self._namespaces.of_fingerprint[job.name.fingerprint]
        return BlockName(job.digest, entry.number, key_start(job.key))

    def _can_begin(self, job: Job) -> bool:
        """Give a write its place. Returns False if it has none yet, or was refused."""
        assert self.places is not None
        if not self._knows_namespace(job):
            return False
        taken = self.places.take(job.kind, self._wall())
        self.counts.evicted_blocks += len(taken.evicted)
        if taken.assign is not None:
            chunk = taken.assign.chunk
            number = self._number()
            self._request(Assign(number, taken.assign), lambda: self._note_assigned(chunk))
        if taken.place is None and not taken.waits:
            self._refuse(job)
        job.place = taken.place
        return taken.place is not None

    def _knows_namespace(self, job: Job) -> bool:
        """Whether the table of the path has the job's namespace. If not, the namespace is written there, or the job is
        refused if the table is full."""
        entry = self._namespaces.of_fingerprint.get(job.name.fingerprint)
        if entry is None:
            added = self._namespaces.add(*job.name, self._used_numbers)
            if added is None:
                self._refuse(job)
                return False
            row, entry = added
            self._request(AddNamespace(self._number(), row, entry), lambda: self._note_written(entry.number))
        return entry.number in self._namespaces.is_written

    def _used_numbers(self) -> set[int]:
        assert self.places is not None
        under_way = {
            entry.number
            for done in self.queue.under_way.values()
            for job in done.jobs
            if (entry := self._namespaces.of_fingerprint.get(job.name.fingerprint)) is not None
        }
        return set(self.places.count_by_namespace()) | under_way

    def _note_assigned(self, chunk: int) -> None:
        assert self.places is not None
        self.places.assigned(chunk)

    def _note_written(self, number: int) -> None:
        self._namespaces.is_written.add(number)

    def _refuse(self, job: Job) -> None:
        self.queue.lanes["write"].withdraw(job)
        self.counts.refused_blocks += 1
        self._host.give_back([job], "refused", "the disk has no room for it now")

    # -- answers --------------------------------------------------------------------------------------------

    def done(self, answer: Done) -> None:
        """Take the child's answer to a request."""
        found = self.queue.under_way.get(answer.number)
        if found is None:
            return
        if found.jobs:
            self._take_results(answer, found)
        else:
            del self.queue.under_way[answer.number]
            (found.or_else if answer.error else found.then)()
        if answer.error:
            self._fail(answer.error)
        elif self.state == "stuck" and not self._is_overdue():
            self._set_state("on", "")
        self.pump()

    def _take_results(self, answer: Done, found: UnderWay) -> None:
        assert self.places is not None
        direction: Direction = "read" if found.jobs[0].is_read else "write"
        jobs = self.queue.end(answer.number, direction, self._clock(), is_good=not answer.error)
        by_fate: dict[Fate | None, list[Job]] = {}
        for job, result in zip(jobs, answer.results, strict=True):
            fate = self._take_read(job, result) if direction == "read" else self._take_write(job, result)
            by_fate.setdefault(fate, []).append(job)
        if corrupt := by_fate.get("corrupt"):
            places = [self.places.where(job.place) for job in corrupt if job.place is not None]
            where = ", ".join(f"{one.number} of chunk {one.chunk}" for one in places)
            self._corrupt_log.log(logging.ERROR, "blocks on disk %s are corrupt: places %s", self.name, where)
        for fate, ended in by_fate.items():
            self._host.give_back(ended, fate, "" if fate is None else answer.error)

    def _take_read(self, job: Job, result: Result) -> Fate | None:
        assert self.places is not None
        assert job.place is not None
        if result == "read":
            self.counts.read_blocks += 1
            self.counts.read_bytes += job.kind.place_bytes
            self._let_go(job)
            return None
        if result == "failed":
            self.counts.failed_blocks += 1
            self._let_go(job)
            return "failed"
        if result == "corrupt":
            self.counts.corrupt_blocks += 1
        if self.places.index.get(job.digest) == job.place:  # not yet removed by a purge or another read
            self.places.remove(job.place)
            self._mark([job.place], None)
        self._let_go(job)
        return "corrupt" if result == "corrupt" else "missing"

    def _take_write(self, job: Job, result: Result) -> Fate | None:
        assert self.places is not None
        assert job.place is not None
        if result == "written" and not job.is_purged and job.digest not in self.places.index:
            self.places.publish(job.place, self._name_of(job), self._wall())
            self.counts.written_blocks += 1
            self.counts.written_bytes += job.kind.place_bytes
            self.written.note(job.kind.place_bytes, self._clock())
            return None
        self.places.abandon(job.place)
        if result == "written":  # its record is valid, so it must be marked
            self._mark([job.place], job.ticket)
        else:
            self._gone.dirty.append(job.place)
            if job.ticket is not None:
                job.ticket.done()
        if result == "failed":
            self.counts.failed_blocks += 1
            return "failed"
        return "cancelled"

    def _let_go(self, job: Job) -> None:
        assert self.places is not None
        assert job.place is not None
        if self.places.let_go(job.place) and job.place not in self._gone.marked:
            self._gone.dirty.append(job.place)

    # -- removed blocks ---------------------------------------------------------------------------------------

    def purge(self, selection: Selection, ticket: PurgeTicket | None) -> int | None:
        """Remove the selected blocks, and return how many there are; None while the files are not open. `ticket`: waits
        for their removal; if None, the blocks are only counted."""
        if self.places is None:
            if ticket is not None:
                if self.state == "starting":
                    ticket.add()
                self._gone.wishes.append(_Wish(selection, ticket if self.state == "starting" else None))
            return None
        chosen = self._select(self.places, selection)
        if ticket is None:
            return len(chosen)
        self._purge_writes(selection, ticket)
        for place in chosen:
            self.places.remove(place)
        if chosen:
            if self.is_on:
                ticket.add()
            self._mark(chosen, ticket if self.is_on else None)
        return len(chosen)

    def purge_notice(self, count: int | None) -> str:
        """Return a sentence that says what a purge leaves in the files for now; empty if it leaves nothing. `count`:
        what `purge` has returned."""
        undoes_writes = any(job.is_purged for done in self.queue.under_way.values() for job in done.jobs)
        if self.state in ("on", "starting") or (count == 0 and not undoes_writes):
            return ""
        what = "what was chosen" if not count else "1 block" if count == 1 else f"{count:,} blocks"
        return (
            f"disk {self.name} is {self.state} ({self.reason}) and keeps {what} in its files. No request finds that "
            "now, and it is removed when the disk works again; if the service restarts before, purge the pool again"
        )

    def _select(self, places: DiskPlaces, selection: Selection) -> list[int]:
        if selection.keys is not None:
            names = self._namespaces.fingerprints_for(selection)
            digests = [digest for one in names for digest in name_digests(one, selection.keys)]
            found = [place for digest in digests if (place := places.index.get(digest)) is not None]
            if not selection.has_age:
                return found
            chosen = set(
                places.select(
                    self._namespaces.numbers_for(selection),
                    written_before=selection.written_before,
                    used_before=selection.used_before,
                )
            )
            return [place for place in found if place in chosen]
        return places.select(
            self._namespaces.numbers_for(selection),
            key_starts=[start_of_keys(prefix) for prefix in selection.prefixes],
            written_before=selection.written_before,
            used_before=selection.used_before,
        )

    def _purge_writes(self, selection: Selection, ticket: PurgeTicket) -> None:
        """Keep the selected blocks that are being written from becoming visible."""
        lane = self.queue.lanes["write"]
        waiting = [job for job in lane.jobs() if selection.takes_job(job)]
        for job in waiting:
            lane.withdraw(job)
        if waiting:
            self._host.give_back(waiting, "cancelled")
        for done in self.queue.under_way.values():
            for job in done.jobs:
                if job.is_read or job.is_purged:
                    continue
                if selection.takes_job(job):
                    job.is_purged = True
                    if self.is_on:
                        job.ticket = ticket
                        ticket.add()

    def _mark(self, places: Sequence[int], ticket: PurgeTicket | None) -> None:
        """Let the records of these places say that their blocks are removed, and then overwrite the places. The caller
        has called `ticket.add`."""
        assert self.places is not None
        mark = _Mark([self.places.where(place) for place in places], list(places), ticket)
        self._gone.marks.append(mark)
        self._gone.marked.update(places)
        self._send_mark(mark)

    def _send_mark(self, mark: _Mark) -> None:
        parts = [mark.places[at : at + MOST_PLACES] for at in range(0, len(mark.places), MOST_PLACES)] or [[]]
        left = [len(parts)]

        def note() -> None:
            left[0] -= 1
            if not left[0]:
                self._note_marked(mark)

        for part in parts:
            self._request(MarkDirty(self._number(), tuple(part)), note)

    def _note_marked(self, mark: _Mark) -> None:
        assert self.places is not None
        self._gone.marks.remove(mark)
        self._gone.marked.difference_update(mark.numbers)
        self._gone.dirty += [place for place in mark.numbers if not self.places.is_read(place)]
        if mark.ticket is not None:
            mark.ticket.done()

    def _overwrite(self) -> None:
        """Overwrite some of the dirty places, all of one length."""
        assert self.places is not None
        size = self.places.kind_of(self._gone.dirty[-1]).place_bytes
        chosen: list[int] = []
        while (
            self._gone.dirty
            and len(chosen) < MOST_PLACES
            and self.places.kind_of(self._gone.dirty[-1]).place_bytes == size
        ):
            chosen.append(self._gone.dirty.pop())
        self._gone.is_overwriting = True
        where = tuple(self.places.where(place) for place in chosen)
        self._request(Overwrite(self._number(), where, size), lambda: self._note_overwritten(chosen))

    def _note_overwritten(self, places: Iterable[int]) -> None:
        assert self.places is not None
        self._gone.is_overwriting = False
        for place in places:
            self.places.clean(place)

    # -- its process ----------------------------------------------------------------------------------------

    def opened(self, found: FoundFiles, file_system_bytes: int) -> None:
        header = found.header
        self.places = DiskPlaces(header.num_chunks, header.chunk_bytes)
        self._namespaces = _Namespaces(dict(found.namespaces))
        self._file_system_bytes = file_system_bytes
        self._gone.dirty = self.places.restore(found.chunks, found.generations)
        self._gone.is_overwriting = False
        self._gone.marked = set()
        for mark in self._gone.marks:
            self._forget_again(mark)
        self._set_state("on", "")
        self._host.send_extents()
        for mark in self._gone.marks:
            self._send_mark(mark)
        wishes, self._gone.wishes = self._gone.wishes, []
        for wish in wishes:
            ticket = wish.ticket or PurgeTicket(lambda: None)
            self.purge(wish.selection, ticket)
            ticket.done()
        self.pump()

    def _forget_again(self, mark: _Mark) -> None:
        """Remove the blocks of a mark again, because the process has ended before it has written or answered the mark.
        Records that are dirty already only need to be synced."""
        assert self.places is not None
        found = [(place, where) for where in mark.places if (place := self.places.cached_at(where)) is not None]
        for place, _ in found:
            self.places.remove(place)
        mark.places, mark.numbers = [where for _, where in found], [place for place, _ in found]
        self._gone.marked.update(mark.numbers)

    def has_problem(self, problem: Problem) -> None:
        self._set_state(problem.state, problem.reason)

    def ended(self, reason: str) -> None:
        """Give all slots back, because the path's process has ended and does not touch them any more."""
        self.counts.restarts += 1
        under_way = [job for done in self.queue.under_way.values() for job in done.jobs]
        for job in under_way:
            if job.is_purged and self.places is not None and job.place is not None:  # its record may be valid
                self._gone.marks.append(_Mark([self.places.where(job.place)], [], job.ticket))
        waiting = [job for lane in self.queue.lanes.values() for job in lane.drain()]
        self.places, self.queue = None, PathQueue()
        self._again.clear()
        self._set_state("starting", reason)
        self._give_back_failed([*under_way, *waiting], reason)

    def tick(self) -> None:
        """Look for operations that are overdue, try a failed disk again, and write the times of use and sync now and
        then."""
        now = self._clock()
        if self.state == "starting" and now - self._since > STUCK_SECONDS:
            self._set_state("stuck", f"its files did not open within {STUCK_SECONDS:.0f} s")
        if self.is_on and self._is_overdue():
            self.counts.timeouts += 1
            self._set_state("stuck", f"an operation has taken more than {STUCK_SECONDS:.0f} s")
            self._empty_queue()
        if self.state == "failed" and self.places is not None and now - self._since >= PROBE_SECONDS:
            self._since = now
            self._send(ProbeFiles(self._number()), lambda: self._set_state("on", ""))
        if self.is_on and now - self._synced_at >= _SYNC_SECONDS:
            self._synced_at = now
            self._write_uses()
            self._send(Sync(self._number()), lambda: None)
        self.pump()

    def _is_overdue(self) -> bool:
        oldest = self.queue.oldest()
        return oldest is not None and self._clock() - oldest.began > STUCK_SECONDS

    def _write_uses(self) -> None:
        assert self.places is not None
        touched, self._touched = self._touched, set()
        for chunk in touched:
            times = self.places.uses_of(chunk)
            for first in range(0, len(times), MOST_USES):
                part = times[first : first + MOST_USES].tobytes()
                self._send(WriteUses(self._number(), chunk, first, part), lambda: None)

    def _fail(self, reason: str) -> None:
        self._set_state("failed", reason)
        self._empty_queue()

    def _empty_queue(self) -> None:
        """Let no read, write or purge wait for a disk that does not work."""
        tickets = [job.ticket for done in self.queue.under_way.values() for job in done.jobs]
        for waiting in (*tickets, *(mark.ticket for mark in self._gone.marks)):
            if waiting is not None:
                waiting.done()
        for done in self.queue.under_way.values():
            for job in done.jobs:
                job.ticket = None
        for mark in self._gone.marks:
            mark.ticket = None
        for direction, lane in self.queue.lanes.items():
            jobs = lane.drain()
            if direction == "read":
                for job in jobs:
                    self._let_go(job)
            self._give_back_failed(jobs, self.reason)

    def _give_back_failed(self, jobs: Sequence[Job], reason: str) -> None:
        if jobs:
            self.counts.failed_blocks += len(jobs)
            self._host.give_back(jobs, "failed", f"disk {self.name}: {reason}")

    def _set_state(self, state: PartState, reason: str) -> None:
        if state != self.state:
            self._since = self._clock()
            log = logger.info if state in ("on", "starting") else logger.warning
            log("disk %s: %s%s", self.name, state, f" ({reason})" if reason else "")
        self.state, self.reason = state, reason
        if state not in ("on", "starting"):
            self._answer_wishes()
        if state == "on":
            again, self._again = self._again, []
            for request, then in again:
                self._send(request._replace(number=self._number()), then)

    def _answer_wishes(self) -> None:
        """Let no purge wait for files that cannot be opened now. The purges are carried out when the files are
        opened."""
        for wish in self._gone.wishes:
            ticket, wish.ticket = wish.ticket, None
            if ticket is not None:
                ticket.done()

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _request(self, request: Any, then: Callable[[], None]) -> None:
        """Send a request, if need be when the disk works again, and call `then` when it was done."""
        if self.state == "failed":
            self._again.append((request, then))
        else:
            self._send(request, then, lambda: self._again.append((request, then)))

    def _send(self, request: Any, then: Callable[[], None], or_else: Callable[[], None] = lambda: None) -> None:
        self.queue.under_way[request.number] = UnderWay(self._clock(), 0, (), then, or_else)
        self._host.send(request)

    # -- operators ------------------------------------------------------------------------------------------

    def part(self) -> StorePart:
        now, places, lanes = self._clock(), self.places, self.queue.lanes
        overdue = [done for done in self.queue.under_way.values() if now - done.began > STUCK_SECONDS]
        per_day = self.written.per_day(now)
        has_wear = per_day is not None and self._file_system_bytes
        return StorePart(
            name=self.name,
            state=self.state,
            reason=self.reason,
            counters=replace(self.counts),
            blocks=None if places is None else len(places.index),
            size_bytes=None if places is None else places.size_bytes,
            used_bytes=None if places is None else places.used_bytes,
            queued_read_bytes=lanes["read"].all_bytes,
            queued_write_bytes=lanes["write"].all_bytes,
            read_bytes_per_second=lanes["read"].rate.per_second,
            write_bytes_per_second=lanes["write"].rate.per_second,
            written_bytes_today=self.written.today(now),
            write_budget_bytes=None if self.budget is None else self.budget.bytes_per_day,
            drive_writes_per_day=(per_day or 0.0) / self._file_system_bytes if has_wear else None,
            stuck_slots=sum(len(done.jobs) for done in overdue),
        )


def key_start(key: bytes) -> int:
    """Return the first 8 bytes of a key, as a number."""
    return int.from_bytes(key[:8].ljust(8, b"\0"), "big")


def start_of_keys(prefix: bytes) -> tuple[int, int]:
    """Return a mask and a value, which match the `key_start` of each key that begins with `prefix`. Only the first 8
    bytes of the prefix count."""
    used = prefix[:8]
    mask = int.from_bytes((b"\xff" * len(used)).ljust(8, b"\0"), "big")
    return mask, key_start(used)
