"""What one path does with its queue, with a process that answers when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvstow_service.stores.disk.blockfile import BlockFile, FoundFiles
from kvstow_service.stores.disk.diskformat import ChunkEntry, Header, PlaceKind, name_digests
from kvstow_service.stores.disk.diskmessages import (
    THREADS,
    ChangeFiles,
    Direction,
    Done,
    MoveBlocks,
    PartAt,
    Result,
)
from kvstow_service.stores.disk.diskpath import PROBE_SECONDS, STUCK_SECONDS, DiskPath
from kvstow_service.stores.disk.pathqueue import Job, Outstanding
from kvstow_service.stores.disk.places import Assignment, BlockName, FoundChunk, Selection, key_start

MIB = 1 << 20
PLACE = 2 * MIB
CHUNK = 64 * MIB
NAMESPACE = 7
KIND, OTHER = PlaceKind("1000", "identity", PLACE), PlaceKind("2000", "another", PLACE)
ASSIGN, MARK_DIRTY, OVERWRITE = BlockFile.assign, BlockFile.mark_dirty, BlockFile.overwrite
PROBE, SYNC, WRITE_USES = BlockFile.probe, BlockFile.sync, BlockFile.write_uses


def key_of(slot: int) -> bytes:
    return b"\0\0" + slot.to_bytes(32, "big")


def digest_of(slot: int) -> bytes:
    return name_digests(NAMESPACE, [key_of(slot)])[0]


class Host:
    """The store and the process of a path."""

    def __init__(self, num_chunks: int = 4) -> None:
        self.now = 1000.0
        self.sent: list[Any] = []
        self.returned: list[tuple[int, bool]] = []
        """The slots that were given back, and whether they were as good ones."""
        self.disk = DiskPath("/disk", self.give_back, None, lambda: self.now, lambda: self.now + 1e9)
        self.found = FoundFiles(Header(1, num_chunks, CHUNK, 4096, 0, False, b"b" * 16, {}), [])
        self._ops = 0
        self.open(self.found)

    @property
    def state(self) -> str:
        return self.disk.state

    def open(self, found: FoundFiles) -> None:
        self.disk.opened(found, 1 << 40, self.send)

    def give_back(self, good: Sequence[Job], bad: Sequence[Job]) -> None:
        for jobs, is_good in ((good, True), (bad, False)):
            for job in jobs:
                job.is_over = True
                self.returned.append((job.slot, is_good))

    def send(self, request: object, *fds: int) -> None:
        self.sent.append(request)

    def write(self, slots: Sequence[int], kind: PlaceKind = KIND) -> list[Job]:
        jobs = [self._job(slot, kind, "write") for slot in slots]
        self._ops += 1
        for job in jobs:
            self.disk.write(job)
        self.disk.pump()
        return jobs

    def read(self, slots: Sequence[int]) -> list[Job]:
        jobs = [self._job(slot, KIND, "read") for slot in slots]
        self._ops += 1
        for job in jobs:
            place = self.disk.place_of(job.name.digest)
            assert place is not None
            job.place = place
            self.disk.read(job)
        self.disk.pump()
        return jobs

    def _job(self, slot: int, kind: PlaceKind, direction: Direction) -> Job:
        name = BlockName(digest_of(slot), NAMESPACE, key_start(key_of(slot)))
        return Job(self._ops, direction, name, key_of(slot), kind, slot, (PartAt(1, slot * PLACE, PLACE),))

    def take(self, what: object) -> list[Any]:
        """The transfers (`MoveBlocks`), or the calls of this method, that wait for an answer, which the test gives."""
        found = [one for one in self.sent if what_of(one) is what]
        self.sent = [one for one in self.sent if what_of(one) is not what]
        return found

    def answer(self, what: object, error: str = "") -> int:
        """Answer all of these. How many there were."""
        found = self.take(what)
        for one in found:
            results: tuple[Result, ...] = ()
            if isinstance(one, MoveBlocks):
                good: Result = "read" if one.kind == "read" else "written"
                results = ("failed" if error else good,) * len(one.blocks)
            self.disk.done(Done(one.number, results, error))
        return len(found)

    def run(self) -> None:
        """Answer everything until nothing is asked any more."""
        while sum(self.answer(what) for what in (ASSIGN, MoveBlocks, MARK_DIRTY, OVERWRITE, SYNC, WRITE_USES)):
            pass


def what_of(request: object) -> object:
    return request.method if isinstance(request, ChangeFiles) else type(request)


@pytest.fixture
def host() -> Host:
    return Host()


def moving(host: Host) -> list[str]:
    return [one.kind for one in host.sent if isinstance(one, MoveBlocks)]


def test_a_write_waits_for_the_chunk(host: Host) -> None:
    host.write([1])
    assert [what_of(one) for one in host.sent] == [ASSIGN]
    host.answer(ASSIGN)
    assert moving(host) == ["write"]
    assert host.disk.place_of(digest_of(1)) is None, "not found before it is written"
    host.answer(MoveBlocks)
    assert host.disk.place_of(digest_of(1)) is not None
    assert host.returned == [(1, True)]


def test_reads_go_first(host: Host) -> None:
    host.write(range(80))
    host.run()
    host.returned.clear()
    for slot in range(0, 80, 2):
        host.read([slot, slot + 1])
    host.write([100, 101])
    assert moving(host) == ["read"] * THREADS["read"]
    while len(host.returned) < 80:
        assert set(moving(host)) == {"read"}, "a read waits, so no write begins"
        one = next(one for one in host.sent if isinstance(one, MoveBlocks))
        host.sent.remove(one)
        results: list[Result] = ["read"] * len(one.blocks)
        host.disk.done(Done(one.number, tuple(results)))
        if host.disk.queue.lanes["read"].is_empty:
            break
    host.run()
    assert {slot for slot, is_good in host.returned if is_good} == {*range(80), 100, 101}


def test_no_more_begins_than_the_process_has_threads(host: Host) -> None:
    host.write(range(60))
    host.answer(ASSIGN)
    assert len(moving(host)) == THREADS["write"]
    assert all(len(one.blocks) * PLACE <= 4 * MIB for one in host.take(MoveBlocks))


def test_owners_take_turns(host: Host) -> None:
    host.write(range(60))
    host.write([200, 201], OTHER)
    host.answer(ASSIGN)
    assert host.answer(MoveBlocks) == THREADS["write"]
    slots = [one.blocks[0].parts[0].offset // PLACE for one in host.take(MoveBlocks)]
    assert 200 in slots, "the second one does not wait for all of the first one"


def test_a_disk_that_fails_gives_everything_back_and_is_probed(host: Host) -> None:
    host.write(range(10))
    host.run()
    host.read(range(10))
    host.returned.clear()
    host.disk.done(Done(host.take(MoveBlocks)[0].number, ("failed", "failed"), "Input/output error"))
    assert (host.state, host.disk.reason) == ("failed", "Input/output error")
    assert host.disk.place_of(digest_of(1)) is None
    host.now += PROBE_SECONDS
    host.disk.tick()
    host.answer(PROBE, "Read-only file system")
    assert host.state == "failed"
    host.now += PROBE_SECONDS
    host.disk.tick()
    host.answer(PROBE)
    assert host.state == "on"
    assert host.disk.place_of(digest_of(1)) is not None


def test_an_operation_that_hangs_stops_what_has_not_begun(host: Host) -> None:
    host.write(range(60))
    host.run()
    host.returned.clear()
    host.read(range(60))
    under_way = sum(len(one.blocks) for one in host.sent)
    host.now += STUCK_SECONDS + 1
    host.disk.tick()
    assert host.state == "stuck"
    assert host.disk.part().stuck_slots == under_way
    assert [is_good for _, is_good in host.returned] == [False] * (60 - under_way)
    assert host.disk.part().counters.timeouts == 1
    host.answer(MoveBlocks)
    assert host.state == "on"
    assert len(host.returned) == 60


def test_a_failed_assignment_is_repeated_when_the_disk_works_again(host: Host) -> None:
    host.write([1])
    host.answer(ASSIGN, "No space left on device")
    assert host.state == "failed"
    host.now += PROBE_SECONDS
    host.disk.tick()
    host.answer(PROBE)
    assert host.answer(ASSIGN) == 1
    host.write([2])
    host.run()
    assert host.disk.place_of(digest_of(2)) is not None


def purge(host: Host, selection: Selection) -> tuple[int | None, list[bool]]:
    """How many blocks were removed, and a list that is no longer empty when the purge has ended."""
    called: list[bool] = []
    waiting = Outstanding(lambda: called.append(True))
    waiting.add(host)
    count = host.disk.purge(selection, waiting)
    waiting.done(host)
    return count, called


ALL = Selection(identity=KIND.identity)


def test_a_purge_answers_when_the_records_are_synced_and_overwrites_after_that(host: Host) -> None:
    host.write(range(4))
    host.run()
    count, called = purge(host, ALL)
    assert (count, called) == (4, [])
    assert host.disk.place_of(digest_of(1)) is None
    assert not host.take(OVERWRITE)
    host.answer(MARK_DIRTY)
    assert called == [True]
    assert host.answer(OVERWRITE) == 1


def test_a_purge_waits_for_a_write_that_is_under_way_and_undoes_it(host: Host) -> None:
    host.write([1])
    host.answer(ASSIGN)
    assert purge(host, ALL)[0] == 0
    _, called = purge(host, ALL._replace(prefixes=(b"\xff",)))
    assert called == [True], "it is about other keys"
    _, called = purge(host, ALL._replace(keys=frozenset([key_of(2)])))
    assert called == [True]
    host.answer(MoveBlocks)
    assert host.disk.place_of(digest_of(1)) is None
    assert host.returned == [(1, False)]
    assert host.answer(MARK_DIRTY) == 1, "its record is valid by now"


def test_a_purged_place_that_is_being_read_is_overwritten_after_the_read(host: Host) -> None:
    host.write([1])
    host.run()
    host.read([1])
    purge(host, ALL)
    host.answer(MARK_DIRTY)
    assert not host.take(OVERWRITE)
    host.answer(MoveBlocks)
    assert len(host.take(OVERWRITE)) == 1


@pytest.mark.parametrize("answers_first", [True, False])
def test_a_process_that_ends_does_not_bring_a_purged_block_back(host: Host, answers_first: bool) -> None:
    """Its record may have become valid before the end."""
    jobs = host.write([1])
    host.answer(ASSIGN)
    _, called = purge(host, ALL)
    if answers_first:
        host.answer(MoveBlocks)
    where = host.disk.places.where(jobs[0].place)
    host.disk.ended("its process has ended")
    assert called == []
    assert host.state == "starting"
    assert host.disk.part().blocks is None
    host.sent.clear()
    host.open(found_with(host, where.number, jobs[0].name.digest))
    assert host.disk.place_of(jobs[0].name.digest) is None
    host.answer(MARK_DIRTY)
    assert called == [True]


def found_with(host: Host, number: int, digest: bytes) -> FoundFiles:
    chunk = FoundChunk(
        Assignment(0, KIND, 1),
        np.array([number]),
        digest,
        np.array([NAMESPACE], np.uint64),
        np.array([0], np.uint64),
        np.array([5.0]),
        np.array([5.0]),
        np.array([], np.int64),
    )
    header = replace(host.found.header, chunks={0: ChunkEntry(1, KIND)})
    return FoundFiles(header, [chunk])


def test_a_purge_while_the_files_are_opened_is_done_then(host: Host) -> None:
    host.disk.ended("its process has ended")
    count, called = purge(host, ALL)
    assert (count, called) == (None, [])
    host.open(found_with(host, 3, digest_of(1)))
    assert host.disk.place_of(digest_of(1)) is None
    host.answer(MARK_DIRTY)
    assert called == [True]


@pytest.mark.parametrize("purged_first", [True, False])
def test_a_purge_while_another_process_has_the_files_is_answered_and_done_when_it_has_them_no_longer(
    host: Host, purged_first: bool
) -> None:
    """It does not hear yet which namespaces the files have."""
    host.disk.ended("its process has ended")
    selection = ALL._replace(keys=frozenset([key_of(1)]))
    if purged_first:
        count, called = purge(host, selection)
        assert (count, called) == (None, [])
        host.disk.set_state("in use", "another process has its files")
    else:
        host.disk.set_state("in use", "another process has its files")
        count, called = purge(host, selection)
    assert (count, called) == (None, [True])
    host.open(found_with(host, 3, digest_of(1)))
    assert host.disk.place_of(digest_of(1)) is None
    assert host.answer(MARK_DIRTY) == 1


def test_a_purge_does_not_wait_for_a_disk_that_does_not_work(host: Host) -> None:
    host.write(range(4))
    host.run()
    host.disk.set_state("failed", "it does not work")
    assert purge(host, ALL) == (4, [True])
    host.now += PROBE_SECONDS
    host.disk.tick()
    host.answer(PROBE)
    assert host.disk.place_of(digest_of(1)) is None
    assert host.answer(MARK_DIRTY) == 1


def test_a_purge_says_what_a_disk_that_does_not_work_keeps(host: Host) -> None:
    host.write(range(4))
    host.run()
    assert host.disk.purge_notice(4) == ""
    host.disk.set_state("failed", "Input/output error")
    assert host.disk.purge_notice(0) == "", "it has nothing of that"
    assert "is failed (Input/output error) and keeps 4 blocks in its files" in host.disk.purge_notice(4)
    assert "keeps what was chosen" in host.disk.purge_notice(None), "its files are not open, so nobody can count"


def test_a_purge_says_that_a_write_hangs_which_it_undoes(host: Host) -> None:
    host.write(range(1))
    host.run()
    host.write(range(1, 5))
    host.now += STUCK_SECONDS + 1
    host.disk.tick()
    assert host.state == "stuck"
    assert purge(host, ALL._replace(keys=frozenset([key_of(99)]))) == (0, [True])
    assert host.disk.purge_notice(0) == "", "none of what hangs was chosen"
    count, called = purge(host, ALL)
    assert (count, called) == (1, [True])
    assert "keeps what was chosen" in host.disk.purge_notice(0)


def test_times_of_use_are_written_once_a_minute(host: Host) -> None:
    host.write(range(4))
    host.run()
    host.now += 61
    host.disk.tick()
    assert not host.take(WRITE_USES), "nothing was used since it was written"
    assert host.answer(SYNC) == 1
    place = host.disk.place_of(digest_of(2))
    assert place is not None
    host.disk.use(place)
    host.now += 61
    host.disk.tick()
    (uses,) = host.take(WRITE_USES)
    assert int.from_bytes(uses.arguments[2][8:12], "little") == int(1e9 + 1061)


def test_wear_is_known_after_an_hour(host: Host) -> None:
    host.write(range(64))
    host.run()
    assert host.disk.part().drive_writes_per_day is None
    host.now += 3600
    assert host.disk.part().drive_writes_per_day == pytest.approx(64 * PLACE * 24 / (1 << 40))


def test_a_corrupt_block_is_counted_and_removed(host: Host) -> None:
    host.write([1])
    host.run()
    host.returned.clear()
    host.read([1])
    host.disk.done(Done(host.take(MoveBlocks)[0].number, ("corrupt",)))
    assert host.returned == [(1, False)]
    assert host.disk.part().counters.corrupt_blocks == 1
    assert host.disk.place_of(digest_of(1)) is None
    host.answer(MARK_DIRTY)
    assert len(host.take(OVERWRITE)) == 1


def test_a_drive_that_fails_does_not_fill_the_log(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(30):
        host.write([number])
        host.run()
        host.read([number])
        host.disk.done(Done(host.take(MoveBlocks)[0].number, ("corrupt",)))
        host.run()
    assert host.disk.part().counters.corrupt_blocks == 30
    assert sum("are corrupt: places" in message for message in caplog.messages) == 10
