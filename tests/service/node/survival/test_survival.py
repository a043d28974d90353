"""What the service records is at the keeper, or nothing of it counts."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.doubles.fakes import FakeClock
from tests.service.node.conftest import NAMESPACE, POOL, WORKER
from tests.service.node.keepers import end_keeper, kinds_held, look, lose_at_the_keeper
from tests.waiting import eventually

from kvstow.attach.channel import MAX_HELLO_BYTES
from kvstow.attach.hello import digest_of
from kvstow.attach.identity import PoolIdentity
from kvstow.config import HugePages
from kvstow.errors import InvalidRequestError, KeeperBusyError, KeeperError
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Populator
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import NodeMemory
from kvstow_service.node.nodehost import POOLS_OF_USER
from kvstow_service.node.pools.nodepool import NodePool, PoolSettings
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.survival.keeperclient import KeeperClient
from kvstow_service.node.survival.roster import Roster, Survivors, WorkerRecord, read_survivors

pytestmark = pytest.mark.process

EXTENT = 2 << 20
HUGE_PAGES: HugePages = "advised"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder; its keeper is ended after the test."""
    yield tmp_path / "state"
    end_keeper(tmp_path / "state")


class Service:
    """The memory of a node with one pool, and its records. Uses no thread."""

    def __init__(self, folder: Path, keep_timeout: float | None = 600.0, **options: Any) -> None:
        self.clock = FakeClock()
        self.records = NodeRecords(folder, keep_timeout, 64 * EXTENT, clock=self.clock, **options)
        self.memory = NodeMemory(MemoryBudget(4 * EXTENT, EXTENT), Populator(MemoryLimits()))
        self.pool = NodePool("a", POOL, "m", PoolSettings())
        self.found = self.take()

    def take(self) -> Survivors:
        return read_survivors(self.records.open(), HUGE_PAGES)

    def fill(self) -> None:
        """All its memory is in rows of a pool, and a worker has it."""
        record = self.pool.record(os.geteuid(), EXTENT)
        self.memory.budget.add_pool("a", record.layout)
        self.memory.budget.attach("a", "s")
        self.records.add_pool(self.pool, record)
        self.records.add_worker(worker_record(), os.pidfd_open(os.getpid()))
        self.memory.apply()
        self.records.save(self.memory)

    def begin(self) -> None:
        self.memory.apply()
        self.records.join(self.memory)

    def check(self) -> None:
        """A second after the last time."""
        self.clock.advance(1.0)
        self.records.check(self.memory)

    def close(self) -> None:
        """As if it were killed, although its process lives."""
        self.records.finish(gives_back=False)
        self.records.close([self.pool])
        self.memory.close()


def worker_record() -> WorkerRecord:
    return WorkerRecord(
        session_id="s",
        token_digest=digest_of("t"),
        number=1,
        pool="a",
        namespace=NAMESPACE.model,
        wanted_slots=None,
        hello=WORKER,
        uid=os.geteuid(),
        gid=os.getegid(),
        has_pidfd=True,
    )


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(keep_timeout: float | None = 600.0, **options: Any) -> Service:
        services.append(Service(folder, keep_timeout, **options))
        return services[-1]

    yield start
    for service in services:
        service.close()
        for pool in service.found.pools:
            pool.journal.close()
            for worker in pool.workers:
                if worker.pidfd is not None:
                    os.close(worker.pidfd)
        for extent, _ in service.found.extents.values():
            extent.close()
        for fd in service.found.given_up:
            os.close(fd)


Start = Callable[..., Service]


def is_cold(found: Survivors) -> bool:
    return not found.extents and not found.pools


def test_the_next_service_finds_what_was_recorded(start: Start, folder: Path) -> None:
    first = start()
    first.begin()
    first.fill()
    assert kinds_held(folder) == {"extent": 4, "journal": 1, "worker": 1, "roster": 1}
    first.close()
    found = start().found
    (pool,) = found.pools
    assert [(row.first_slot, row.num_slots, row.extents) for row in pool.rows] == [(0, 512, (1, 2)), (512, 512, (3, 4))]
    assert pool.workers[0].record == worker_record()
    assert (sorted(found.extents), found.given_up) == ([1, 2, 3, 4], [])
    assert pool.record == first.pool.record(os.geteuid(), EXTENT)


def test_spare_memory_keeps_its_last_owner_and_rows_of_a_pool_that_is_gone_do_not_come_back(start: Start) -> None:
    first = start()
    first.begin()
    first.fill()
    first.memory.budget.record_mapping("s/0", 3)
    first.memory.budget.detach("a", "s")
    first.memory.budget.remove_pool("a")
    first.memory.apply()
    first.records.remove_pool(first.pool)
    first.records.save(first.memory)
    first.close()
    found = start().found
    assert {number: owner for number, (_, owner) in found.extents.items()} == dict.fromkeys((1, 2, 4), os.geteuid())
    assert (found.pools, len(found.given_up)) == ([], 1), "a process maps the other one still"


def test_a_keeper_that_is_killed_beside_the_service_loses_nothing(start: Start, folder: Path) -> None:
    service = start()
    service.begin()
    service.fill()
    for joins in (2, 3):
        end_keeper(folder, signal.SIGKILL)
        service.check()
        assert (service.records.joins, service.records.notice) == (joins, None)
        assert kinds_held(folder) == {"extent": 4, "journal": 1, "worker": 1, "roster": 1}
    service.close()
    assert len(start().found.extents) == 4


def test_a_keeper_that_the_next_service_would_not_find_is_replaced(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has removed the state folder. The keeper still answers over the connection that it has."""
    service = start()
    service.begin()
    service.fill()
    pidfd = os.pidfd_open(look(folder).pid)
    shutil.rmtree(folder)
    service.check()
    assert (service.records.joins, service.records.notice) == (2, None)
    assert f"the socket of the last one was removed from {folder}" in caplog.text
    assert kinds_held(folder) == {"extent": 4, "journal": 1, "worker": 1, "roster": 1}
    assert select.select([pidfd], [], [], 30)[0], "the last one has ended"
    os.close(pidfd)
    service.close()
    assert len(start().found.extents) == 4


@pytest.mark.parametrize(
    "error", [BlockingIOError(errno.EAGAIN, "no processes left"), subprocess.TimeoutExpired("no processes left", 10)]
)
def test_without_a_keeper_the_service_goes_on_and_says_so(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise error

    service = start()
    service.begin()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", refuse)
        end_keeper(folder, signal.SIGKILL)
        service.check()
        service.fill()
        assert "no processes left" in str(service.records.notice)
    service.check()
    assert service.records.notice is None
    assert kinds_held(folder) == {"extent": 4, "journal": 1, "worker": 1, "roster": 1}


@pytest.fixture
def stopped(folder: Path) -> Iterator[Callable[[], Callable[[], None]]]:
    """Stops the keeper. What it returns lets the keeper go on."""
    pids: list[int] = []

    def stop() -> Callable[[], None]:
        pids.append(look(folder).pid)
        os.kill(pids[-1], signal.SIGSTOP)
        return lambda: os.kill(pids[-1], signal.SIGCONT)

    yield stop
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


Stopped = Callable[[], Callable[[], None]]


def in_a_process_that_ends(act: Callable[[], object]) -> None:
    """As if the service that acts were killed then."""
    child = os.fork()
    if not child:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_keeper_has_is_void_once_the_service_has_parted_from_it(start: Start, stopped: Stopped) -> None:
    """It stalls, the service changes its memory, and ends before the keeper goes on."""

    def act() -> None:
        service = start()
        service.begin()
        go_on = stopped()
        service.fill()
        assert "does not answer" in str(service.records.notice)
        go_on()

    in_a_process_that_ends(act)
    after = start()
    assert is_cold(after.found)
    assert len(after.found.given_up) == 4


def test_a_service_comes_back_to_a_keeper_that_has_stalled(start: Start, stopped: Stopped) -> None:
    service = start()
    service.begin()
    go_on = stopped()
    service.fill()
    for _ in range(3):
        service.check()  # does not wait
    assert service.records.notice is not None
    go_on()

    def is_back() -> bool:
        service.check()
        return service.records.notice is None

    eventually(is_back)
    service.close()
    assert len(start().found.extents) == 4


def test_a_keeper_that_hangs_is_told_and_loses_nothing_once_it_goes_on(
    start: Start, stopped: Stopped, folder: Path
) -> None:
    """Nothing else asks it anything while the memory stays as it is."""
    service = start()
    service.begin()
    service.fill()
    pid, go_on = look(folder).pid, stopped()

    def is_now(state: str) -> bool:
        service.check()
        return service.records.keeper == state

    eventually(lambda: is_now("silent"))
    (told,) = service.records.unsaved
    assert told == f"the keeper (pid {pid}) does not answer: the memory may not survive the service"
    go_on()
    eventually(lambda: is_now("connected"))
    assert (service.records.unsaved, service.records.joins) == ((), 1), "it was not replaced"
    service.close()
    assert len(start().found.extents) == 4


def test_a_service_starts_cold_beside_a_keeper_that_does_not_answer_and_joins_it_later(
    start: Start, stopped: Stopped, folder: Path
) -> None:
    first = start()
    first.begin()
    first.fill()
    first.close()
    go_on = stopped()
    second = start(wait_seconds=0.05)
    assert is_cold(second.found)
    second.begin()
    assert second.records.notice is not None
    go_on()

    def has_joined() -> bool:
        second.check()
        return second.records.joins == 1

    eventually(has_joined)
    assert kinds_held(folder) == {"extent": 4, "roster": 1}, "nothing of the first one"


def test_a_start_that_dies_in_recovery_is_followed_by_a_cold_one(start: Start) -> None:
    first = start()
    first.begin()
    first.fill()
    first.close()

    def recover() -> None:
        assert len(start().found.extents) == 4

    in_a_process_that_ends(recover)
    last = start()
    assert is_cold(last.found)
    assert len(last.found.given_up) == 4


def test_a_service_waits_for_the_process_before_it_and_then_says_so(start: Start, folder: Path) -> None:
    first = start()
    first.begin()
    first.fill()
    with pytest.raises(KeeperBusyError, match="the process of the service before is still there"):
        NodeRecords(folder, 600.0, EXTENT, wait_seconds=0.05).open()
    first.close()
    assert len(start().found.extents) == 4, "waiting is no start that has failed"


def test_the_roster_never_names_what_the_keeper_lacks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing: the keeper, then the roster. Shrinking: the roster, then the keeper."""
    named: list[set[str]] = []
    seen: list[tuple[str, set[str]]] = []
    write, put, drop = Roster.write, KeeperClient.put, KeeperClient.drop

    def note_write(roster: Roster, content: Mapping[str, Any]) -> None:
        write(roster, content)
        named.append({f"extent-{number}" for number, *_ in content["extents"]})

    def note_put(client: KeeperClient, fds: dict[str, int], **options: bool) -> None:
        seen.append(("put", named[-1]))
        put(client, fds, **options)

    def note_drop(client: KeeperClient, labels: Collection[str]) -> None:
        seen.append(("drop", named[-1]))
        drop(client, labels)

    monkeypatch.setattr(Roster, "write", note_write)
    service = start()
    service.begin()
    monkeypatch.setattr(KeeperClient, "put", note_put)
    monkeypatch.setattr(KeeperClient, "drop", note_drop)
    service.memory.budget.total_bytes = 3 * EXTENT
    service.memory.apply()
    service.records.save(service.memory)
    service.memory.budget.total_bytes = 4 * EXTENT
    service.memory.apply()
    service.records.save(service.memory)
    three = {"extent-1", "extent-2", "extent-3"}
    assert seen == [("drop", three), ("put", three)]
    assert named[-1] == {*three, "extent-5"}


@pytest.mark.parametrize(
    ("lost", "num_extents", "num_pools", "num_given_up"),
    [
        ("extent-1", 0, 1, 3),
        ("extent-3", 2, 1, 1),
        ("journal", 0, 0, 4),
        ("worker", 0, 0, 4),
        ("roster", 0, 0, 4),
    ],
)
def test_whatever_the_keeper_lacks_costs_that_and_what_depends_on_it(
    start: Start, folder: Path, lost: str, num_extents: int, num_pools: int, num_given_up: int
) -> None:
    first = start()
    first.begin()
    first.fill()
    first.close()
    for label in [label for label in look(folder).labels if label.startswith(lost)]:
        lose_at_the_keeper(folder, label)
    found = start().found
    assert (len(found.extents), len(found.pools), len(found.given_up)) == (num_extents, num_pools, num_given_up)


def test_a_pool_that_cannot_be_read_costs_no_other_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its identity is what an engine has said."""
    first = start()
    first.begin()
    record = first.pool.record(os.geteuid(), EXTENT)
    first.memory.budget.add_pool("a", record.layout)
    first.records.add_pool(first.pool, record)
    first.records.save(first.memory)
    first.close()

    def refuse(*_: object) -> PoolIdentity:
        raise InvalidRequestError("record of a pool")

    monkeypatch.setattr("kvstow_service.node.survival.roster.read_value", refuse)
    found = start().found
    assert (found.pools, len(found.extents)) == ([], 4), "the spare ones"
    assert "of an earlier service is not used: record of a pool" in caplog.text


def test_the_roster_has_room_for_the_pools_of_some_users() -> None:
    """Each with identities of the longest hellos: what does not fit costs all of them the keeper."""
    roster = Roster.create()
    content = {"pools": ["x" * MAX_HELLO_BYTES] * (5 * POOLS_OF_USER)}
    roster.write(content)
    assert Roster.read(roster.fd) == content
    roster.close()


def test_more_than_the_roster_can_say_is_not_recorded_and_the_service_goes_on(start: Start) -> None:
    def act() -> None:
        service = start()
        service.pool = NodePool("a", replace(POOL, kv_cache_dtype="x" * (33 << 20)), "m", PoolSettings())
        service.begin()
        service.fill()
        assert "the record takes" in str(service.records.notice)

    in_a_process_that_ends(act)
    assert is_cold(start().found)


@pytest.fixture
def start_elsewhere(
    folder: Path, child_environ: dict[str, str], stack: ExitStack
) -> Callable[[], subprocess.Popen[bytes]]:
    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvstow_service", "keeper", "--state", str(folder), "--keep-timeout", "10min"]
        keeper = stack.enter_context(subprocess.Popen(command, env=child_environ))
        stack.callback(keeper.kill)
        return keeper

    return start


def test_a_service_uses_the_keeper_that_others_start_and_starts_none(
    start: Start, folder: Path, start_elsewhere: Callable[[], subprocess.Popen[bytes]]
) -> None:
    service = start(None, wait_seconds=0.05)
    service.begin()
    assert f"none has its socket in {folder}" in str(service.records.notice)
    with pytest.raises(KeeperError):
        look(folder)
    for joins in (1, 2):
        keeper = start_elsewhere()

        def has_joined(joins: int = joins) -> bool:
            service.check()
            return service.records.joins == joins

        eventually(has_joined)
        assert look(folder).pid == keeper.pid, "`kvstow keeper` becomes the keeper"
        assert kinds_held(folder) == {"extent": 4, "roster": 1}
        if joins == 1:
            keeper.kill()
            keeper.wait()
    service.records.finish(gives_back=True)
    assert not kinds_held(folder)
    assert keeper.poll() is None, "it waits for the next service"
