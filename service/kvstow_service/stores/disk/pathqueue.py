"""The jobs that wait for one path, and the requests that its child process has."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kvstow_service.stores.disk.diskformat import PlaceKind
from kvstow_service.stores.disk.diskmessages import THREADS, Direction, Done, PartAt
from kvstow_service.stores.disk.places import BlockName

_BATCH_BYTES, _BATCH_BLOCKS = 4 << 20, 16
"""How many bytes and blocks one thread of the child reads or writes at a time."""
_RATE_SECONDS = 4.0
"""A rate covers about this many of the last seconds with work."""


class Outstanding:
    """Counts what each party still has to do, and calls `then` when nothing is left. Used under the store's lock."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._left = Counter[object]()

    def add(self, who: object) -> None:
        self._left[who] += 1

    def done(self, who: object) -> None:
        """Note that a party has done one thing. Does nothing if the party has given up."""
        if self._left[who]:
            self._left[who] -= 1
            self._end()

    def give_up(self, who: object) -> None:
        """Stop waiting for this party."""
        if self._left.pop(who, 0):
            self._end()

    def _end(self) -> None:
        if not self._left.total():
            then, self._then = self._then, lambda: None
            then()


@dataclass(slots=True, eq=False)
class Job:
    """One block of a transfer. `parts`: its slot on each rank. `place`: the place of the block, which a write
    gets when it begins. `is_over`: whether its slot was given back, or is about to be. `is_purged`: whether this is a
    write whose block must not be found. `purge`: the purge that waits for it."""

    op_id: int
    direction: Direction
    name: BlockName
    key: bytes
    kind: PlaceKind
    slot: int
    parts: tuple[PartAt, ...]
    place: int = -1
    is_over: bool = False
    has_begun: bool = False
    is_purged: bool = False
    purge: Outstanding | None = None


class UnderWay(NamedTuple):
    """A request that the child has. `jobs`: the jobs of a transfer; empty for any other request. `take`: takes the
    answer."""

    began: float
    jobs: tuple[Job, ...]
    take: Callable[[Done, UnderWay], None]


class BusyRate:
    """The rate of requests in bytes per second, for the time in which some are under way. Not locked."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._last = 0.0

    def note(self, num_bytes: int, now: float, *, began: float) -> None:
        """Note that a request has ended that began at `began`. Several may be under way at the same time."""
        self._bytes, self._seconds = self._after(num_bytes, now, began)
        self._last = now

    def _after(self, num_bytes: int, now: float, began: float) -> tuple[float, float]:
        seconds = max(0.0, now - max(self._last, began))
        keep = max(0.0, 1 - seconds / _RATE_SECONDS)
        return self._bytes * keep + num_bytes, self._seconds * keep + seconds

    @property
    def per_second(self) -> float | None:
        return self._bytes / self._seconds if self._seconds > 0 else None

    def at_most(self, num_bytes: int, now: float, *, began: float) -> float | None:
        """Return `per_second`, or the rate that would result if the `num_bytes` that are under way since `began` came
        now, whichever is lower. So a device that has become slow is noticed before it answers."""
        measured = self.per_second
        bytes_then, seconds = self._after(num_bytes, now, began)
        return measured if measured is None or seconds <= 0 else min(measured, bytes_then / seconds)


@dataclass(slots=True)
class JobLane:
    """The jobs of one direction. Owners take turns."""

    most_under_way: int
    waiting: OrderedDict[str, deque[Job]] = field(default_factory=OrderedDict)
    queued_bytes: int = 0
    under_way_bytes: int = 0
    num_under_way: int = 0
    rate: BusyRate = field(default_factory=BusyRate)

    def add(self, job: Job) -> None:
        self.waiting.setdefault(job.kind.owner, deque()).append(job)
        self.queued_bytes += job.kind.place_bytes

    def withdraw(self, job: Job) -> None:
        """Count a job as ended, because it is given back. It leaves the queue when its turn comes."""
        job.is_over = True
        self.queued_bytes -= job.kind.place_bytes

    def first(self, owner: str) -> Job | None:
        """Return the next job of an owner, or None."""
        queue = self.waiting[owner]
        while queue and queue[0].is_over:
            queue.popleft()
        return queue[0] if queue else None

    def pop(self, owner: str) -> Job:
        job = self.waiting[owner].popleft()
        self.queued_bytes -= job.kind.place_bytes
        return job

    def turns(self) -> Iterator[str]:
        """Yield the owners that have jobs, each once, beginning with the owner whose turn it is."""
        for owner in list(self.waiting):
            if self.first(owner) is None:
                del self.waiting[owner]
            else:
                yield owner

    def had_turn(self, owner: str) -> None:
        if owner in self.waiting:
            self.waiting.move_to_end(owner)

    def drain(self) -> list[Job]:
        """Take all jobs out of the queue, and return them."""
        found = [job for queue in self.waiting.values() for job in queue if not job.is_over]
        self.waiting.clear()
        self.queued_bytes = 0
        return found

    def jobs(self) -> Iterator[Job]:
        return (job for queue in self.waiting.values() for job in queue if not job.is_over)

    @property
    def is_empty(self) -> bool:
        return not self.queued_bytes

    @property
    def all_bytes(self) -> int:
        return self.queued_bytes + self.under_way_bytes


class PathQueue:
    """Reads go first: a write begins only while no read waits. Not locked."""

    def __init__(self) -> None:
        self.lanes: dict[Direction, JobLane] = {kind: JobLane(THREADS[kind]) for kind in ("read", "write")}
        self.under_way: dict[int, UnderWay] = {}
        """The requests under way by number, the oldest first."""
        self.numbers = count(1)
        """The numbers of requests."""
        self.again: list[Callable[[], None]] = []
        """Repeats requests that have failed, when the disk works again."""

    def next(self, direction: Direction, is_ready: Callable[[Job], bool]) -> tuple[Job, ...]:
        """Take the jobs that may begin now; there may be none. `is_ready` gives a write its place, and returns False if
        the write must wait. It may also end the job (`is_over`), and then returns False, too."""
        lane = self.lanes[direction]
        if lane.num_under_way >= lane.most_under_way or (direction == "write" and not self.lanes["read"].is_empty):
            return ()
        for owner in list(lane.turns()):
            jobs: list[Job] = []
            num_bytes = 0
            while (job := lane.first(owner)) is not None and (not jobs or job.op_id == jobs[0].op_id):
                if jobs and (num_bytes + job.kind.place_bytes > _BATCH_BYTES or len(jobs) == _BATCH_BLOCKS):
                    break
                if not is_ready(job):
                    if job.is_over:
                        continue
                    break
                jobs.append(lane.pop(owner))
                num_bytes += job.kind.place_bytes
            if jobs:
                lane.had_turn(owner)
                return tuple(jobs)
        return ()

    def begin(self, direction: Direction, jobs: tuple[Job, ...]) -> None:
        for job in jobs:
            job.has_begun = True
        lane = self.lanes[direction]
        lane.num_under_way += 1
        lane.under_way_bytes += _bytes_of(jobs)

    def end(self, direction: Direction, done: UnderWay, now: float, *, is_good: bool) -> None:
        lane, num_bytes = self.lanes[direction], _bytes_of(done.jobs)
        lane.num_under_way -= 1
        lane.under_way_bytes -= num_bytes
        if is_good:
            lane.rate.note(num_bytes, now, began=done.began)

    def read_rate(self, now: float) -> float | None:
        """Return the bytes per second of reads, including reads that are under way; None if no read has ended yet."""
        lane = self.lanes["read"]
        oldest = next((one for one in self.under_way.values() if one.jobs and one.jobs[0].direction == "read"), None)
        if oldest is None:
            return lane.rate.per_second
        return lane.rate.at_most(lane.under_way_bytes, now, began=oldest.began)

    @property
    def jobs_under_way(self) -> list[Job]:
        return [job for done in self.under_way.values() for job in done.jobs]


def _bytes_of(jobs: Sequence[Job]) -> int:
    return sum(job.kind.place_bytes for job in jobs)
