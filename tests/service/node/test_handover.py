"""The service and its keeper are killed at once: the engines hand everything back to the next service."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.service.node import rawengine
from tests.service.node.noderunner import EXTENT_BYTES, RunningNode
from tests.service.node.rawengine import HELLO, POOL, RawEngine, key_of
from tests.service.node.survival.test_survival import end_keeper

from kvstow.attach.calls import Hold
from kvstow.attach.connection import AttachConnection
from kvstow.attach.extentcalls import AdoptedExtents
from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import JournalError
from kvstow.memfd import identify_memfd
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import identity_of
from kvstow_service.node import noderecovery
from kvstow_service.node.node import Node, NodeSettings
from kvstow_service.node.noderecovery import NodeRecovery
from kvstow_service.node.pools.nodepool import NodePool, PoolSettings
from kvstow_service.node.survival import handover
from kvstow_service.node.survival.handover import Handover
from kvstow_service.node.survival.keeperclient import KeeperClient
from kvstow_service.node.survival.poolrecord import PoolRecord

pytestmark = pytest.mark.process

EXTENTS = 8
KEYS = [key_of(number) for number in range(40)]
WRITING = [key_of(1000), key_of(1001)]


class Pod:
    """Where services, keepers and engines come and go."""

    def __init__(self, folder: Path, environ: dict[str, str], eventually: Any, stack: ExitStack) -> None:
        self.folder, self.environ, self.eventually, self.stack = folder, environ, eventually, stack
        self.socket, self.state = folder / "node" / "attach.sock", folder / "state"
        self.first = RunningNode(self.socket, self.state, environ, EXTENTS)
        stack.callback(end_keeper, self.state)
        stack.callback(self.first.kill)
        self.engine = self.attach()
        self.engine.store_until_found(KEYS)
        self.node: Node

    def attach(self, **options: Any) -> RawEngine:
        engine = RawEngine(self.socket, **options)
        self.stack.callback(engine.close)
        return engine

    def other_process(self) -> subprocess.Popen[str]:
        """An engine that finds the keys stored, and is in the middle of a store."""
        command = [sys.executable, rawengine.__file__, str(self.socket), "20", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environ)
        self.stack.callback(process.communicate)
        self.stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        process.send_signal(signal.SIGSTOP)  # it never speaks again
        return process

    def replace(self) -> Node:
        """Kill service and keeper, and start the next service, in this process."""
        self.first.kill()
        end_keeper(self.state, signal.SIGKILL)
        (self.folder / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
        limits = MemoryLimits(self.folder / "meminfo", self.folder / "cgroup", self.folder / "fs")
        settings = NodeSettings(
            memory_bytes=EXTENTS * EXTENT_BYTES,
            attach_socket=self.socket,
            extent_bytes=EXTENT_BYTES,
            populate_pause=0,
            state=self.state,
        )
        self.failures: list[str] = []
        self.node = Node(settings, limits=limits, on_failure=self.failures.append)
        self.stack.callback(self.node.close)
        self.node.start()
        return self.node

    def hand_back(self, **options: Any) -> RawEngine:
        """The engine attaches and hands everything back. Returns its next session."""
        heir = self.attach(heir_of=self.engine, **options)
        for worker, old in zip(heir.workers, self.engine.workers, strict=True):
            worker.hand_back(old)
        heir.wait_for(lambda: heir.scheduler.state != "attached")
        heir.close()
        return self.attach(**options)

    @property
    def settled(self) -> dict[str, Any]:
        return {"settled_tokens": (self.engine.welcome.token,)}

    def pool(self) -> NodePool:
        (pool,) = self.node.host.pools()
        return pool

    def quarantined(self) -> int:
        return self.pool().facade.stats().pool.slots.quarantined

    def is_waiting(self) -> bool:
        return self.pool().earlier is not None


@pytest.fixture
def pod(tmp_path: Path, child_environ: dict[str, str], eventually: Any) -> Iterator[Pod]:
    with ExitStack() as stack:
        yield Pod(tmp_path, child_environ, eventually, stack)


def found(engine: RawEngine) -> int:
    return engine.lookup(KEYS, Hold.NOTHING).leading


def test_every_block_is_found_again_and_has_its_bytes(pod: Pod) -> None:
    inodes = {os.fstat(fd).st_ino for worker in pod.engine.workers for fd in worker.fds.values()}
    node = pod.replace()
    assert node.host.pools() == []
    engine = pod.hand_back(**pod.settled)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    assert pod.pool().facade.stats().stores["stored"] == 0
    assert {os.fstat(fd).st_ino for worker in engine.workers for fd in worker.fds.values()} == inodes
    pod.eventually(lambda: node.memory.figures.allocated_bytes == EXTENTS * EXTENT_BYTES, "never a second pool")
    pod.eventually(lambda: not pod.is_waiting())
    assert (node.host.handovers.given_up_extents, node.memory.faults, node.memory.figures.failures) == (0, 0, ())
    engine.store_all([key_of(number) for number in range(100, 300)])  # it grows and evicts as usual
    pod.pool().check_integrity()
    infos = KeeperClient.look(pod.state).infos
    assert f"journal-{pod.pool().name}" in infos
    assert sum(name.startswith("extent-") for name in infos) == EXTENTS


def test_it_survives_the_next_service_too(pod: Pod) -> None:
    pod.replace()
    engine = pod.hand_back(**pod.settled)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    journal = engine.workers[0].deposits.held["journal"]
    content = IndexJournal.look(journal)
    assert len(content["roster"]["workers"]) == 2, "those of the service before have ended"
    assert len(content["roster"]["extents"]) == 2 * len(engine.workers[0].fds)


def test_what_a_session_was_writing_waits_until_it_has_spoken(pod: Pod) -> None:
    assert len(pod.engine.begin_store(WRITING).slots) == 2
    pod.replace()
    other = pod.hand_back()  # the same process says nothing of the session before
    other.wait_for(lambda: found(other) == len(KEYS))
    assert (pod.quarantined(), pod.is_waiting()) == (2, True)
    engine = pod.attach(**pod.settled)
    pod.eventually(lambda: (pod.quarantined(), pod.is_waiting()) == (0, False))
    engine.store_all(WRITING)
    assert engine.load(WRITING) == 2


def test_another_process_that_may_still_write_keeps_its_slots_until_it_is_dead(pod: Pod) -> None:
    other = pod.other_process()
    pod.engine.wait_for(lambda: len(pod.engine.workers[0].deposits.held) == 2 + 3)
    pod.replace()
    engine = pod.hand_back(**pod.settled)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    assert (pod.quarantined(), pod.is_waiting()) == (1, True)
    engine.store_all([key_of(2000)])
    assert (pod.quarantined(), pod.is_waiting()) == (1, True)
    assert len(pod.node.host.sessions()) == 2, "the session that has spoken is over"
    other.kill()
    pod.eventually(lambda: (pod.quarantined(), pod.is_waiting()) == (0, False))


def test_a_worker_whose_pidfd_nobody_has_never_counts_as_dead(pod: Pod) -> None:
    other = pod.other_process()
    pod.engine.wait_for(lambda: len(pod.engine.workers[0].deposits.held) == 2 + 3)
    for worker in pod.engine.workers:
        worker.deposits.drop([name for name in worker.deposits.held if name.startswith("worker-")])
    pod.replace()
    other.kill()
    other.wait()
    engine = pod.hand_back(**pod.settled)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    assert (pod.quarantined(), pod.is_waiting()) == (1, True)
    engine.store_all([key_of(2000)])
    assert (pod.quarantined(), pod.is_waiting()) == (1, True)
    assert len(pod.node.host.sessions()) == 2, "the session that has spoken is over"


def is_given_up(pod: Pod) -> bool:
    pod.hand_back(**pod.settled).close()
    heir = pod.attach(heir_of=pod.engine, **pod.settled)
    calls = [worker.hand_back(old) for worker, old in zip(heir.workers, pod.engine.workers, strict=True)]
    heir.wait_for(lambda: all(call.done for call in calls))
    assert [call.answer(AdoptedExtents).extent_ids for call in calls] == [(), ()]
    heir.store_all(KEYS[:2])
    given_up = sum(len(worker.fds) for worker in pod.engine.workers)
    return pod.node.host.handovers.given_up_extents == given_up and found(heir) == 2


def test_a_pool_that_is_taken_over_in_part_ends_the_service_and_gets_no_engine(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    pod.replace()
    monkeypatch.setattr(noderecovery, "recover", fail)
    heir = pod.attach(heir_of=pod.engine, **pod.settled)
    for worker, old in zip(heir.workers, pod.engine.workers, strict=True):
        worker.hand_back(old)
    heir.wait_for(lambda: pod.failures)
    assert "taken over in part" in pod.failures[0]
    fresh = AttachConnection(pod.socket, lambda: HELLO)
    pod.stack.callback(fresh.close)

    def is_refused() -> bool:
        fresh.poll(0.01)
        return fresh.refusal == "adopting"

    pod.eventually(is_refused)


def test_nothing_is_taken_while_the_service_before_is_alive(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_SERVICE_SECONDS", 0.1)
    for worker in pod.engine.workers:
        worker.deposits.put(["service"], [os.pidfd_open(os.getpid())], replaces=False)
    pod.replace()
    assert is_given_up(pod)


def test_a_journal_that_others_could_have_written_is_not_believed(pod: Pod) -> None:
    forged = IndexJournal.create(100, dict(IndexJournal.look(pod.engine.workers[0].deposits.held["journal"])))
    for worker in pod.engine.workers:
        worker.deposits.put(["journal"], [os.dup(forged.fd)], replaces=False)
    forged.close()
    pod.replace()
    assert is_given_up(pod)


def test_the_journal_of_another_layout_is_refused(pod: Pod) -> None:
    hello = replace(HELLO, pool=replace(POOL, kv_cache_dtype="fp8"))
    other = pod.attach(hello=hello)
    other.store_all(KEYS[:3])
    for worker, of_other in zip(pod.engine.workers, other.workers, strict=True):
        worker.deposits.put(["journal"], [os.dup(of_other.deposits.held["journal"])], replaces=False)
    pod.replace()
    assert is_given_up(pod)


def test_without_the_journal_memory_is_given_up_and_a_new_pool_begins(pod: Pod) -> None:
    for worker in pod.engine.workers:
        worker.deposits.close()
    pod.replace()
    heir = pod.attach(heir_of=pod.engine)
    for worker, old in zip(heir.workers, pod.engine.workers, strict=True):
        worker.hand_back(old)
    heir.store_all(KEYS[:2])
    assert pod.node.host.handovers.given_up_extents == sum(len(old.fds) for old in pod.engine.workers)


def test_with_its_first_extent_a_worker_has_a_roster_that_names_it_and_the_extent(pod: Pod) -> None:
    """So no engine can hand back memory that an unknown process has."""
    second = pod.attach()
    second.wait_for(lambda: all(worker.fds for worker in second.workers))
    roster = IndexJournal.look(pod.engine.workers[0].deposits.held["journal"])["roster"]
    for engine in (pod.engine, second):
        assert sum(engine.welcome.session_id in text for text in roster["workers"]) == 2
        assert not any(engine.welcome.token in text for text in roster["workers"]), "it is the engine's secret"
    noted = {identity_of(text, pod.engine.welcome.pool) for text in roster["extents"]}
    assert noted >= {identify_memfd(fd) for worker in second.workers for fd in worker.fds.values()}


def test_a_roster_that_does_not_fit_leaves_none() -> None:
    """The roster before it would name too few workers, and the next service would believe it."""
    pool = NodePool("pool", POOL, "model", PoolSettings())
    record = PoolRecord("pool", "model", os.getuid(), POOL, EXTENT_BYTES)
    journal = IndexJournal.create(100, {"pool": record.to_json()})
    pool.begin_journal(journal)
    pool.write_roster({"extents": ["1"], "workers": ["first"]})
    journal.protect()
    assert IndexJournal.look(journal.fd)["roster"]["workers"] == ["first"]
    with pytest.raises(JournalError, match="allowed: 1 MiB"):
        pool.write_roster({"extents": ["1"], "workers": ["first", "x" * (1 << 20)]})
    assert "roster" not in IndexJournal.look(journal.fd)
    handed_back = Handover()
    ended = os.open(os.devnull, os.O_RDONLY)  # always readable, as the pidfd of a process that has ended
    handed_back.put_deposits(["journal", "service"], [os.dup(journal.fd), ended])
    with pytest.raises(JournalError, match="names no workers and extents"):
        handed_back.take(POOL, 0)
    handed_back.close()
    pool.end_journal()
    journal.close()


def test_a_worker_holds_the_pidfds_of_those_that_have_mapped_the_memory(pod: Pod) -> None:
    other = pod.other_process()
    first, rank_1 = pod.engine.workers[0], pod.engine.workers[1]
    pod.engine.wait_for(lambda: len(first.deposits.held) == len(rank_1.deposits.held) == 2 + 3)
    other.kill()
    pod.engine.wait_for(lambda: len(first.deposits.held) == len(rank_1.deposits.held) == 2 + 1)
    assert first.deposits.held.keys() - rank_1.deposits.held.keys() == {f"worker-{pod.engine.welcome.session_id}/1"}
    pod.first.stop()
    pod.engine.wait_for(lambda: not first.deposits.held and not rank_1.deposits.held)


Break = Callable[[pytest.MonkeyPatch], None]


def counts_the_unseen_as_dead(patch: pytest.MonkeyPatch) -> None:
    taken = Handover.take

    def take(self: Handover, *values: Any) -> dict[str, Any]:
        kept = taken(self, *values)
        return {name: held for name, held in kept.items() if '"has_pidfd":false' not in held.info}

    patch.setattr(Handover, "take", take)


def forgets_the_workers_of_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeRecovery, "_take_worker", lambda self, held: os.close(held.fd))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (counts_the_unseen_as_dead, test_a_worker_whose_pidfd_nobody_has_never_counts_as_dead),
        (forgets_the_workers_of_before, test_another_process_that_may_still_write_keeps_its_slots_until_it_is_dead),
        (forgets_the_workers_of_before, test_what_a_session_was_writing_waits_until_it_has_spoken),
    ],
)
def test_taking_out_a_safeguard_is_noticed(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, mutant: Break, test: Callable[[Pod], None]
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(pod)
