from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.descriptors import all_closed_again
from tests.engine.control import journalwriter
from tests.engine.control.journalwriter import NAMESPACE, SESSION, SLOTS, Operation, operations

from kvstow.control.indexjournal import LEARNED_BYTES, IndexJournal, RecoveredIndex
from kvstow.errors import ForeignMemoryError, IntegrityError, InvalidRequestError, JournalError, PinError

CONTENT = {"pool": "llama-0a1b2c", "layout": [4096], "namespaces": {"3": "weights-1"}}

State = tuple[str, object]  # ("empty", None), ("filling", session) or ("block", (namespace, key))
EMPTY: State = ("empty", None)


@pytest.fixture
def journal() -> Iterator[IndexJournal]:
    journal = IndexJournal.create(SLOTS, CONTENT)
    yield journal
    journal.close()


def reopen(journal: IndexJournal) -> IndexJournal:
    return IndexJournal.open(os.dup(journal.fd))


def recover(journal: IndexJournal) -> RecoveredIndex:
    return recover_as(IndexJournal, journal)


def recover_as(kind: type[IndexJournal], journal: IndexJournal) -> RecoveredIndex:
    again = kind.open(os.dup(journal.fd))
    try:
        return again.recover()
    finally:
        again.close()


def states(found: RecoveredIndex) -> dict[int, State]:
    """Of all slots that are not empty."""
    blocks = {
        slot: ("block", (namespace, key)) for namespace, index in found.blocks.items() for key, slot in index.items()
    }
    filling = {slot: ("filling", session) for session, slots in found.filling.items() for slot in slots}
    assert not blocks.keys() & filling.keys()
    return {**blocks, **filling}


def advance(present: dict[int, State], operation: Operation) -> dict[int, State]:
    """The states after the operation."""
    changed = dict(present)
    for number, slot in enumerate(operation.slots):
        if operation.verb == "begin":
            changed[slot] = ("filling", SESSION)
        elif operation.verb == "publish":
            changed[slot] = ("block", (NAMESPACE, operation.keys[number]))
        else:
            changed.pop(slot, None)
    return changed


def illegal(found: RecoveredIndex, before: dict[int, State], after: dict[int, State]) -> list[str]:
    """Slots that are neither what they were, nor empty, nor what they become."""
    now = states(found)
    wrong = []
    for slot in range(SLOTS):
        old, new, is_now = (of.get(slot, EMPTY) for of in (before, after, now))
        allowed = {old, new, EMPTY} if old != new else {old}
        if is_now not in allowed:
            wrong.append(f"slot {slot} was {old}, becomes {new}, and is {is_now}")
    return wrong


def test_what_was_published_is_recovered_in_the_order_of_publishing(journal: IndexJournal) -> None:
    journal.begin([5, 1, 3, 7], SESSION)
    journal.publish([5, 1], 3, [b"e" * 34, b"a" * 34])
    journal.publish([3], 4, [b"a" * 34])
    journal.begin([1], SESSION + 1)
    found = recover(journal)
    assert found.blocks == {3: {b"e" * 34: 5}, 4: {b"a" * 34: 3}}
    assert found.filling == {SESSION: [7], SESSION + 1: [1]}
    assert found.dropped_slots == []
    journal.publish([7], 3, [b"b" * 34])
    assert list(recover(journal).blocks[3]) == [b"e" * 34, b"b" * 34]


def test_order_goes_on_after_a_recovery(journal: IndexJournal) -> None:
    journal.begin([0, 1, 2], 1)
    journal.publish([2], 1, [b"first"])
    again = reopen(journal)
    again.recover()
    again.publish([0], 1, [b"later"])
    again.close()
    assert list(recover(journal).blocks[1].items()) == [(b"first", 2), (b"later", 0)]


def test_of_a_key_that_was_journaled_twice_the_later_slot_counts(journal: IndexJournal) -> None:
    journal.begin([4, 9], 1)
    journal.publish([9], 1, [b"key"])
    journal.publish([4], 1, [b"key"])
    found = recover(journal)
    assert (found.blocks, found.dropped_slots) == ({1: {b"key": 4}}, [9])
    assert recover(journal).dropped_slots == [], "it is empty now"


def test_keys_of_several_lengths_have_their_length_back(journal: IndexJournal) -> None:
    keys = [b"\0", b"\0" * 34, bytes(range(40))]
    for slot, key in enumerate(keys):
        journal.begin([slot], 1)
        journal.publish([slot], 0, [key])
    assert recover(journal).blocks[0] == {key: slot for slot, key in enumerate(keys)}


def test_publishing_a_slot_that_was_not_begun_is_a_defect(journal: IndexJournal) -> None:
    with pytest.raises(IntegrityError, match="not begun"):
        journal.publish([1], 1, [b"key"])
    journal.begin([1], 1)
    journal.publish([1], 1, [b"key"])
    with pytest.raises(IntegrityError, match="not begun"):
        journal.publish([1], 1, [b"other"])
    journal.begin([2], 1)
    journal.clear([2])
    with pytest.raises(IntegrityError, match="not begun"):
        journal.publish([2], 1, [b"other"])
    assert recover(journal).blocks == {1: {b"key": 1}}


@pytest.mark.parametrize(
    "call",
    [
        lambda journal: journal.publish([1], 1, [b"x" * 41]),
        lambda journal: journal.publish([1], 1, [b""]),
        lambda journal: journal.publish([1, 2], 1, [b"x", b"xy"]),
        lambda journal: journal.begin([SLOTS], 1),
        lambda journal: journal.begin([-1], 1),
        lambda journal: journal.clear([SLOTS]),
        lambda journal: IndexJournal.create(0, {}),
    ],
)
def test_a_call_out_of_range_is_refused(journal: IndexJournal, call: Callable[[IndexJournal], object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed|one length|keys"):
        call(journal)


def test_no_slots_are_no_work(journal: IndexJournal) -> None:
    journal.begin([], 1)
    journal.publish([], 1, [])
    journal.clear([])
    assert states(recover(journal)) == {}


class Crash(BaseException):
    """The process ends here."""


class Dying(IndexJournal):
    """Dies during a write: an arbitrary subset of the words has reached memory, and one checksum is torn."""

    writes_left = -1
    chance = random.Random(0)

    def _store(self, rows: NDArray[np.intp], words: int | slice, values: Any) -> None:
        self.writes_left -= 1
        if self.writes_left != 0:
            super()._store(rows, words, values)
            return
        before = self._records[rows]
        super()._store(rows, words, values)
        after = self._records[rows]
        arrived = np.array([self.chance.random() < 0.5 for _ in range(before.size)], bool).reshape(before.shape)
        torn = np.where(arrived, after, before)
        if words == 0 and len(rows):
            mask = np.uint64((1 << 8 * self.chance.randrange(1, 8)) - 1)
            torn[0, 0] = (after[0, 0] & mask) | (before[0, 0] & ~mask)
        self._records[rows] = torn
        raise Crash


def crash_rounds(kind: type[IndexJournal], rounds: int) -> list[str]:
    """What was wrong after crashes at random writes."""
    wrong: list[str] = []
    for seed in range(rounds):
        chance = random.Random(seed)
        journal = kind.create(SLOTS, CONTENT)
        assert isinstance(journal, Dying)
        journal.chance, journal.writes_left = chance, chance.randrange(2, 60)
        before: dict[int, State] = {}
        try:
            for operation in operations(seed):
                after = advance(before, operation)
                try:
                    journalwriter.apply(journal, operation)
                except Crash:
                    break
                before = after
            wrong += illegal(recover_as(kind, journal), before, after)
            wrong += illegal(recover_as(kind, journal), before, after)  # recovering changes nothing more
        except (IntegrityError, ValueError) as error:
            wrong.append(repr(error))
        finally:
            journal.close()
    return wrong


def test_a_crash_in_the_middle_of_any_write_leaves_old_empty_or_new() -> None:
    assert crash_rounds(Dying, 400) == []


class WithoutErasing(Dying):
    def _erase(self, rows: NDArray[np.intp]) -> None:
        """The next write makes the old record invalid anyway, one might think."""


class ChecksumFirst(Dying):
    """And the checksum says only that the record is there."""

    def _checksums(self, rows: NDArray[np.intp], records: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return np.ones(len(rows), np.uint64)

    def _store(self, rows: NDArray[np.intp], words: int | slice, values: Any) -> None:
        if isinstance(words, slice):
            self._records[rows, 0] = 1
        super()._store(rows, words, values)


@pytest.mark.parametrize("mutant", [WithoutErasing, ChecksumFirst])
def test_a_journal_without_one_of_its_protections_is_found_out(mutant: type[IndexJournal]) -> None:
    assert crash_rounds(mutant, 100) != []


def test_a_record_counts_in_its_own_slot_of_its_own_journal_only(journal: IndexJournal) -> None:
    journal.begin([1], 1)
    journal.publish([1], 1, [b"key"])
    record = os.pread(journal.fd, 64, records_at() + 64)
    os.pwrite(journal.fd, record, records_at() + 2 * 64)
    other = IndexJournal.create(SLOTS, CONTENT)
    os.pwrite(other.fd, record, records_at() + 64)
    assert states(recover(journal)).keys() == {1}
    assert states(recover(other)) == {}
    other.close()


def records_at() -> int:
    return 2 << 20


def test_a_changed_byte_makes_a_record_empty(journal: IndexJournal) -> None:
    chance = random.Random(1)
    for slot in range(64):
        journal.begin([slot], 1)
        journal.publish([slot], 1, [chance.randbytes(34)])
    for slot in range(64):
        at = records_at() + slot * 64 + slot  # each byte of a record once
        (value,) = os.pread(journal.fd, 1, at)
        os.pwrite(journal.fd, bytes([value ^ 1]), at)
    assert recover(journal).blocks == {}


def test_the_content_says_what_the_records_mean(journal: IndexJournal) -> None:
    assert journal.content == CONTENT
    for number in range(5):
        journal.write_content({**CONTENT, "number": number})
    again = reopen(journal)
    assert again.content == {**CONTENT, "number": 4}
    again.write_content({"number": 5})
    again.close()
    assert reopen_content(journal) == {"number": 5}


def reopen_content(journal: IndexJournal) -> object:
    again = reopen(journal)
    again.close()
    return again.content


@pytest.mark.parametrize("written", [0, 1, 20, 100])
def test_a_crash_while_the_content_is_written_leaves_the_one_before(journal: IndexJournal, written: int) -> None:
    journal.write_content({"number": 1})
    there = os.pread(journal.fd, records_at(), 0)
    journal.write_content({"number": 2})
    new = os.pread(journal.fd, records_at(), 0)
    at = next(place for place in range(len(new)) if new[place] != there[place]) // (1 << 20) * (1 << 20)
    os.pwrite(journal.fd, new[: at + written] + there[at + written :], 0)
    assert reopen_content(journal) in ({"number": 1}, {"number": 2} if written == 100 else {"number": 1})


def test_content_that_is_too_long_is_refused(journal: IndexJournal) -> None:
    with pytest.raises(JournalError, match="1 MiB"):
        journal.write_content({"x": "y" * (1 << 20)})
    assert reopen_content(journal) == CONTENT


def test_a_journal_of_another_version_is_refused_with_both_versions(
    journal: IndexJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.indexjournal.VERSION", 2)
    fd = os.dup(journal.fd)
    with pytest.raises(JournalError, match="has version 1; this service reads version 2"):
        IndexJournal.open(fd)
    os.close(fd)


def test_a_header_that_is_not_whole_is_refused(journal: IndexJournal) -> None:
    os.pwrite(journal.fd, bytes(records_at()), 0)
    fd = os.dup(journal.fd)
    with pytest.raises(JournalError, match="no whole header"):
        IndexJournal.open(fd)
    os.pwrite(fd, b"KVSTOWIX" + struct.pack("<IIQ", 1, 1 << 31, 1), 0)
    with pytest.raises(JournalError, match="no whole header"):
        IndexJournal.open(fd)
    os.close(fd)


def test_memory_of_others_is_no_journal() -> None:
    fd = os.memfd_create("kvstow-journal")
    with pytest.raises(ForeignMemoryError):
        IndexJournal.open(fd)
    os.close(fd)


def test_recovering_takes_no_memory_for_slots_that_were_never_used() -> None:
    journal = IndexJournal.create(1 << 20, CONTENT)
    assert recover(journal).blocks == {}
    for slot in (3, 1 << 19, (1 << 20) - 1):
        journal.begin([slot], 1)
        journal.publish([slot], 1, [b"%d" % slot])
    before = journal.resident_bytes
    assert sorted(recover(journal).blocks[1].values()) == [3, 1 << 19, (1 << 20) - 1]
    assert journal.resident_bytes == before <= LEARNED_BYTES + 7 * 4096
    journal.close()


def test_a_journal_takes_memory_for_the_slots_that_are_reserved() -> None:
    journal = IndexJournal.create(1 << 20, CONTENT)
    assert journal.resident_bytes <= LEARNED_BYTES + 8192
    journal.reserve(0, 1 << 14)
    assert journal.resident_bytes <= (65 << 14) + LEARNED_BYTES + 8192
    journal.begin(range(1 << 14), 1)
    journal.write_pasts(0, bytes(1 << 14))
    journal.write_learned(bytes(LEARNED_BYTES - 8))
    assert journal.resident_bytes <= (65 << 14) + LEARNED_BYTES + 8192
    journal.reserve(5, 5)
    journal.close()


def test_pasts_and_what_was_learned_are_there_again(journal: IndexJournal) -> None:
    assert (journal.pasts(SLOTS), journal.learned()) == (bytes(SLOTS), b"")
    journal.write_pasts(3, bytes([7, 8, 9]))
    journal.write_learned(b"a longer one")
    journal.write_learned(b"some bytes")
    journal.write_learned(bytes(LEARNED_BYTES))  # has no room
    again = IndexJournal.open(os.dup(journal.fd))
    assert (again.pasts(7), again.learned()) == (bytes([0, 0, 0, 7, 8, 9, 0]), b"some bytes")
    assert again.recover().blocks == {}
    again.close()


@pytest.mark.parametrize("at", [0, 3, 4, 8, 17])
def test_what_was_learned_is_dropped_if_a_byte_of_it_has_changed(journal: IndexJournal, at: int) -> None:
    journal.write_learned(b"some bytes")
    start = os.pread(journal.fd, os.fstat(journal.fd).st_size, 0).index(b"some bytes")
    offset = start - 8 + at
    os.pwrite(journal.fd, bytes([os.pread(journal.fd, 1, offset)[0] ^ 0x80]), offset)
    assert journal.learned() == b""


def test_memory_that_is_refused_is_an_error(journal: IndexJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PinError, match=r"12\.5 KiB for the journal of the index: No space") as caught:
        journal.reserve(0, SLOTS)
    assert caught.value.reason == "out_of_memory"


def test_closing_leaves_nothing_and_may_come_twice() -> None:
    with all_closed_again():
        journal = IndexJournal.create(SLOTS, CONTENT)
        journal.close()
        journal.close()
    assert "kvstow-journal" not in Path("/proc/self/maps").read_text()


def recover_full(slots: int) -> float:
    """Of a journal in which every slot has a block. Returns the seconds of the processor that it took."""
    journal = IndexJournal.create(slots, CONTENT)
    keys = np.random.default_rng(1).bytes(34 * slots)
    for at in range(0, slots, 50_000):
        chosen = range(at, at + 50_000)
        journal.begin(chosen, 1)
        journal.publish(chosen, 1, [keys[slot * 34 : slot * 34 + 34] for slot in chosen])
    assert journal.resident_bytes <= 65 * slots + LEARNED_BYTES + 16384
    started = os.times()
    found = recover(journal)
    ended = os.times()
    journal.close()
    assert len(found.blocks[1]) == slots
    assert found.blocks[1][keys[-34:]] == slots - 1
    return ended.user + ended.system - started.user - started.system


def test_a_full_journal_is_recovered_from_65_bytes_a_slot() -> None:
    recover_full(50_000)


@pytest.mark.soak
def test_a_million_slots_are_recovered_in_time() -> None:
    assert recover_full(1_000_000) < 5
