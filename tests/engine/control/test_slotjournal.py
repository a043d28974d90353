"""A shared pool keeps its journal: random schedules look, after every write to it, at what would be recovered now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.control.sharedhost import Host
from tests.engine.control.test_session_schedules import (
    CHOICES,
    EXTENT_SLOTS,
    Engine,
    Engines,
    run_schedules,
    runs_of_two,
)
from tests.seeds import few_and_many

from kvstow.config import EngineConfig
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal, RecoveredIndex
from kvstow.control.namespaces import NamespaceLabel
from kvstow.control.session import sessions_of
from kvstow.control.sharedpool import EarlierSession, SharedPool, recover
from kvstow.errors import InvalidRequestError
from kvstow.messages import Completion

__all__ = ["runs_of_two"]

pytestmark = pytest.mark.usefixtures("no_log_lines")

MAX_SLOTS = 64


class WatchedJournal(IndexJournal):
    """Calls `watch` after each write to its records."""

    opened: ClassVar[list[WatchedJournal]] = []
    watch: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, fd: int, max_slots: int) -> None:
        super().__init__(fd, max_slots)
        self.opened.append(self)

    def _store(self, rows: NDArray[np.intp], words: Any, values: Any) -> None:
        super()._store(rows, words, values)
        self.watch()

    def recovered(self) -> RecoveredIndex:
        """What the next process would find now."""
        again = copy(self)
        again.watch = lambda: None
        again._records = self._records.copy()
        return again.recover()


@pytest.fixture(autouse=True)
def no_journal_is_left() -> Iterator[None]:
    """Schedules that fail close nothing."""
    yield
    while WatchedJournal.opened:
        WatchedJournal.opened.pop().close()


def names(journal: IndexJournal) -> dict[int, str]:
    return {tag: label.name for tag, label in journal.namespaces().items()}


class JournaledEngines(Engines):
    """At every write to the journal, each block in it has its bytes on all ranks, and no slot is empty that a process
    still uses. Between calls, the journal says what the pool says."""

    def make_pool(self, config: EngineConfig) -> SharedPool:
        self.journal = WatchedJournal.create(MAX_SLOTS, {"pool": "a", "namespaces": []})
        self.engines = []
        self.ended = []
        pool = SharedPool(config, clock=self.clock, slice_slots=2, journal=self.journal)
        self.journal.watch = self.check_bytes
        return pool

    def check_bytes(self) -> None:
        found = self.journal.recovered()
        names_now = names(self.journal)
        for tag, blocks in found.blocks.items():
            for key, slot in blocks.items():
                for rank in self.pool.config.storing_ranks:
                    content = self.memory[rank][slot // EXTENT_SLOTS].get(slot)
                    assert tag not in names_now or content == names_now[tag].encode() + key, "recovered bytes are wrong"
        self.check_uses(found)

    def check_uses(self, found: RecoveredIndex) -> None:
        filling = {slot for slots in found.filling.values() for slot in slots}
        in_use = filling.union(*(blocks.values() for blocks in found.blocks.values()))
        for engine in [*self.engines, *self.ended]:
            for _, op in engine.queued():
                assert op.direction == "load" or filling.issuperset(op.slots), "a slot that is written is not begun"
        held = {slot for session in sessions_of(self.pool) for slots in session.held_slots() for slot in slots}
        assert in_use >= held, "a slot that is read is empty in the journal"

    def books_balance(self) -> None:
        super().books_balance()
        if not hasattr(self, "engines"):
            return
        found, names_now = self.journal.recovered(), names(self.journal)
        visible = {names_now[tag]: blocks for tag, blocks in found.blocks.items() if tag in names_now}
        index = self.pool.index
        key_of = index.slot_keys.key_of
        wanted = {
            one.name: {key: index.namespaces.find_all([key]) for slot in one.keys.slots() if (key := key_of[slot])}
            for one in index.namespaces
            if one.keys and not one.is_dropped
        }
        assert {name: sorted(blocks) for name, blocks in visible.items()} == {
            name: sorted(blocks) for name, blocks in wanted.items()
        }
        used = {slot for blocks in found.blocks.values() for slot in blocks.values()}
        used.update(slot for slots in found.filling.values() for slot in slots)
        assert used == self.pool.slots.used_slots()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "journal"):
            self.journal.close()


class ServiceKilled(BaseException):
    """What the service was doing ends here."""


class Restarted:
    """Where the words of an earlier service's engines go: they are still said in a session of the new one."""

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        for session in self.pool.attached():
            session.complete(rank, session.ranks.boot_id(rank) or boot_id, completions)


class RestartedEngines(JournaledEngines):
    """The service is killed, also between two writes to the journal, and the next one recovers. The engines' processes
    live on, and finish their copies."""

    choices: ClassVar = [*CHOICES, ("restart", "at once"), ("restart", "and copy"), *[("restart", "at a write")] * 2]
    writes_left: int | None = None

    def check_bytes(self) -> None:
        super().check_bytes()
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise ServiceKilled

    def do(self, who: str, what: str, pick: int) -> None:
        if who == "restart" and what == "at a write":
            self.writes_left = pick % 11
        elif who == "restart":
            self.restart()
            if what == "and copy":
                self.copy_after_others_have_stored()
        else:
            try:
                super().do(who, what, pick)
            except ServiceKilled:
                self.restart()

    def restart(self) -> None:
        self.writes_left = None
        before, self.sweep = self.pool, None
        found = self.journal.recovered()
        before.journal, before.earlier = None, None
        self.journal = WatchedJournal.open(os.dup(self.journal.fd))
        self.pool = SharedPool(before.config, clock=self.clock, slice_slots=2, journal=self.journal)
        for num_slots in before.extents:
            self.pool.add_extent(num_slots)
        self.pool.set_populated(before.populated_slots)
        lived_on = [engine for engine in (*self.engines, *self.ended) if engine.alive]
        assert self.journal.recover() == found
        self.journal.watch = self.check_bytes
        recover(self.pool, found, names(self.journal), [self.earlier(engine) for engine in lived_on])
        self.engines, self.ended = [], lived_on
        for engine in lived_on:
            engine.pool = self.pool
            for rank in engine.ranks:
                rank.engine = Restarted(self.pool)  # type: ignore[assignment]

    def copy_after_others_have_stored(self) -> None:
        """Earlier engines do the rest of their copies when new ones have used what room there is."""
        self.life("attach", 4)
        for rank in self.engines[0].ranks:
            rank.pin(self.pool.capacity)
        for pick in range(3):
            self.everyone_stores(pick)
            self.operate("purge", pick)
        self.copy("copy all", 0)

    def teardown(self) -> None:
        self.writes_left = None
        super().teardown()

    def earlier(self, engine: Engine) -> EarlierSession:
        number = engine.session.session_id
        return EarlierSession(number, "engine", frozenset((number, rank) for rank in engine.alive))


@pytest.mark.parametrize("seeds", few_and_many(100, 300))
def test_a_restart_at_any_write_recovers_all_blocks_and_reuses_no_slot_too_early(seeds: range) -> None:
    run_schedules(seeds, RestartedEngines)


def test_keys_that_do_not_fit_into_the_journal_are_refused_before_anything_changes() -> None:
    journal = WatchedJournal.create(8, {})
    host = Host(journal=journal)
    client = host.attach()
    with pytest.raises(InvalidRequestError, match=r"keys of \[41\] bytes; allowed: keys of one length, from 1 to 40"):
        client.session.begin_store([b"x" * 41], [0])
    with pytest.raises(InvalidRequestError, match=r"keys of \[2, 3\] bytes"):
        client.session.begin_store([b"ab", b"abc"], [0, 1])
    with pytest.raises(InvalidRequestError, match=r"keys of \[0\] bytes"):
        client.session.begin_store([b""], [0])
    assert host.counts["free"] == 8
    assert client.session.begin_store([], []).op is None
    client.store([b"ab", b"cd"])
    assert journal.recovered().blocks == {0: {b"ab": 0, b"cd": 1}}


def test_a_dropped_namespace_is_not_recovered_although_its_blocks_are_still_there() -> None:
    journal = WatchedJournal.create(8, {})
    host = Host(journal=journal)
    client = host.attach(namespace="old")
    client.store([b"a"])
    host.attach(namespace="other")
    client.session.lose("it has ended")
    host.kill(client)
    assert names(journal) == {1: "other", 0: "old"}, "the first ones are the most important"
    host.pool.drop_namespace("old")  # nobody runs the sweep
    assert names(journal) == {1: "other"}
    assert list(journal.recovered().blocks) == [0]


def test_a_dropped_block_that_is_still_read_keeps_its_slot_over_a_restart() -> None:
    journal = WatchedJournal.create(8, {})
    host = Host(journal=journal)
    client, other = host.attach(namespace="old"), host.attach(namespace="other")
    client.store([b"a"])
    assert client.session.acquire([b"a"]).slots == (0,)
    client.session.lose("it has ended, and its process lives on")
    host.pool.drop_namespace("old")
    other.store([b"b"])
    for processes in ([client.processes[0]], []):
        again = SharedPool(host.pool.config, journal=journal)
        again.add_extent(8)
        again.set_populated(8)
        earlier = EarlierSession(client.session.session_id, "engine", frozenset(processes))
        assert recover(again, journal.recover(), names(journal), [earlier]) == 1
        PoolFacade(again).check_integrity()
        assert again.slots.is_used(0) == bool(processes)
        assert again.slots.is_used(1)


def test_more_names_than_fit_leave_out_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = WatchedJournal.create(8, {"pool": "a" * 1000})
    journal.name_namespaces((number, NamespaceLabel(f"{number:0100}", {"a": 1})) for number in range(10_000))
    named = journal.namespaces()
    assert named[5] == (f"{5:0100}", {"a": 1})
    assert 1000 < len(named) < 10_000
    assert list(named) == list(range(len(named)))
    assert journal.content["pool"] == "a" * 1000


def test_a_new_namespace_costs_no_labels_for_which_the_journal_has_no_room() -> None:
    asked: list[str] = []

    class LongLabels(SharedPool):
        def namespace_label(self, name: str) -> NamespaceLabel:
            asked.append(name)
            return NamespaceLabel(name, "a" * 250_000)

    pool = LongLabels(Host().pool.config, journal=WatchedJournal.create(8, {}))
    sessions = [pool.attach("engine", f"namespace-{number}") for number in range(20)]
    asked.clear()
    sessions.append(pool.attach("engine", "one-more"))
    assert 0 < len(asked) <= 5
