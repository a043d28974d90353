"""A shared pool keeps its journal: random schedules look, after every write to it, at what would be recovered now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.control.sharedhost import Host
from tests.engine.control.test_session_schedules import EXTENT_SLOTS, Engines, no_log_lines, run_schedules, runs_of_two

from kvstow.config import EngineConfig
from kvstow.control.indexjournal import IndexJournal, RecoveredIndex
from kvstow.control.ops import OpenOp, OpsInFlight
from kvstow.control.pool import Pool
from kvstow.control.sharedpool import SharedPool
from kvstow.errors import InvalidRequestError
from kvstow.messages import Completion

__all__ = ["no_log_lines", "runs_of_two"]

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


@pytest.fixture(autouse=True)
def no_journal_is_left() -> Iterator[None]:
    """Schedules that fail close nothing."""
    yield
    while WatchedJournal.opened:
        WatchedJournal.opened.pop().close()


def recovered(journal: IndexJournal) -> RecoveredIndex:
    """What the next process would find now."""
    copy = IndexJournal.__new__(IndexJournal)
    copy._records, copy._salt, copy.max_slots = journal._records.copy(), journal._salt, journal.max_slots
    return copy.recover()


def names(journal: IndexJournal) -> dict[int, str]:
    return dict(journal.content["namespaces"])


class JournaledEngines(Engines):
    """At every write to the journal, each block in it has its bytes on all ranks, and no slot is empty that a process
    still uses. Between calls, the journal says what the pool says."""

    def make_pool(self, config: EngineConfig, replicated: bool) -> SharedPool:
        self.journal = WatchedJournal.create(MAX_SLOTS, {"pool": "a", "namespaces": []})
        self.engines = []
        self.ended = []
        pool = SharedPool(config, clock=self.clock, slice_slots=2, replicated=replicated, journal=self.journal)
        self.journal.watch = self.check_bytes
        return pool

    def check_bytes(self) -> None:
        found = recovered(self.journal)
        names_now = names(self.journal)
        for tag, blocks in found.blocks.items():
            for key, slot in blocks.items():
                for rank in self.pool.storing_ranks:
                    content = self.memory[rank][slot // EXTENT_SLOTS].get(slot)
                    assert tag not in names_now or content == names_now[tag].encode() + key, "recovered bytes are wrong"
        self.check_uses(found)

    def check_uses(self, found: RecoveredIndex) -> None:
        filling = {slot for slots in found.filling.values() for slot in slots}
        in_use = filling.union(*(blocks.values() for blocks in found.blocks.values()))
        for engine in [*self.engines, *self.ended]:
            for _, op in engine.queued():
                assert op.direction == "load" or filling.issuperset(op.slots), "a slot that is written is not begun"
        held = {slot for session in self.pool.sessions for slots in session.held_slots() for slot in slots}
        assert in_use >= held, "a slot that is read is empty in the journal"

    def books_balance(self) -> None:
        super().books_balance()
        if not self.checks_books or not hasattr(self, "engines"):
            return
        found, names_now = recovered(self.journal), names(self.journal)
        visible = {names_now[tag]: blocks for tag, blocks in found.blocks.items() if tag in names_now}
        index = self.pool.index
        wanted = {
            one.name: {key: index.namespaces.find_all([key]) for key in one.keys._slot_of}
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


def test_at_every_write_the_journal_can_be_recovered() -> None:
    run_schedules(150, JournaledEngines)


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
    assert recovered(journal).blocks == {0: {b"ab": 0, b"cd": 1}}


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
    assert list(recovered(journal).blocks) == [0]


def test_more_names_than_fit_leave_out_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = WatchedJournal.create(8, {"pool": "a" * 1000})
    journal.name_namespaces({number: f"{number:0100}" for number in range(10_000)})
    named = names(journal)
    assert 1000 < len(named) < 10_000
    assert list(named) == list(range(len(named)))
    assert journal.content["pool"] == "a" * 1000


# -- mutants ------------------------------------------------------------------------------------------------------


def the_journal_publishes_before_the_bytes_are_whole(patch: pytest.MonkeyPatch) -> None:
    """When the first rank has finished."""
    accept = OpsInFlight._accept

    def too_early(self: OpsInFlight, entry: OpenOp, rank: int, completion: Completion) -> None:
        journal = self._pool.journal
        assert journal is not None
        accept(self, entry, rank, completion)
        if entry.op.direction == "store" and completion.mark == "done" and entry.pending:
            journal.publish(entry.op.slots, entry.namespace.tag, entry.keys)

    patch.setattr(OpsInFlight, "_accept", too_early)


def the_journal_begins_nothing(patch: pytest.MonkeyPatch) -> None:
    """What the slots held stays in the journal while others write them."""
    patch.setattr(WatchedJournal, "begin", lambda self, slots, session: None)
    patch.setattr(WatchedJournal, "publish", publish_unbegun)


def publish_unbegun(self: IndexJournal, slots: Any, namespace: int, keys: Any) -> None:
    IndexJournal.begin(self, slots, 1)
    IndexJournal.publish(self, slots, namespace, keys)


def failed_stores_are_published(patch: pytest.MonkeyPatch) -> None:
    end = OpsInFlight._end_store

    def publish(self: OpsInFlight, entry: OpenOp) -> None:
        journal = self._pool.journal
        if entry.error and not entry.abandoned and journal is not None:
            journal.publish(entry.op.slots, entry.namespace.tag, entry.keys)
        end(self, entry)

    patch.setattr(OpsInFlight, "_end_store", publish)


def removed_slots_are_cleared_although_they_are_read(patch: pytest.MonkeyPatch) -> None:
    note = Pool.note_removal

    def clear_all(self: Pool, removal: Any, reason: str) -> None:
        note(self, removal, reason)
        if self.journal is not None and removal.orphans:
            self.journal.clear(removal.orphans)

    patch.setattr(Pool, "note_removal", clear_all)


def namespaces_are_named_after_the_first_one(patch: pytest.MonkeyPatch) -> None:
    name = WatchedJournal.name_namespaces

    def all_alike(self: WatchedJournal, names: dict[int, str]) -> None:
        first = next(iter(names.values()))
        name(self, dict.fromkeys(names, first))

    patch.setattr(WatchedJournal, "name_namespaces", all_alike)


MUTANTS = [
    the_journal_publishes_before_the_bytes_are_whole,
    the_journal_begins_nothing,
    failed_stores_are_published,
    removed_slots_are_cleared_although_they_are_read,
    namespaces_are_named_after_the_first_one,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_taking_out_a_safeguard_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    monkeypatch.setattr(JournaledEngines, "checks_books", False)  # what would be recovered must tell
    with pytest.raises(AssertionError):
        run_schedules(150, JournaledEngines)
