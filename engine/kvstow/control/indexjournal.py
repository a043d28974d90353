"""The journal of a pool's index: what each slot holds, in memory that outlives the process that writes it."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstow.bytesize import format_size
from kvstow.control.journalheader import COPY_BYTES, HEADER_BYTES, read_header, write_header
from kvstow.control.journalrecord import (
    COMMIT,
    KEY,
    MAX_KEY_BYTES,
    ORDER,
    RECORD_BYTES,
    STATE,
    WORDS,
    Words,
    checksums,
    filling_state,
    is_filling,
    make_blocks,
    read_blocks,
    sessions_of,
)
from kvstow.control.slotjournal import NamespaceLabel
from kvstow.errors import IntegrityError, InvalidRequestError, JournalError, PinError
from kvstow.memfd import create_memfd, require_memfd

JOURNAL_NAME = "kvstow-journal"
_OTHER_BYTES = 256  # of a copy of the header, besides the content


@dataclass(frozen=True, slots=True)
class RecoveredIndex:
    """What a journal held when its writer ended.

    `blocks`: by number of the namespace, the slot of each key; keys in the order in which they were published.
    `filling`: by number of the session, the slots that it may still be writing to. All other slots are empty.
    `dropped_slots`: of blocks that were journaled twice, the older; they are empty now.
    """

    blocks: Mapping[int, dict[bytes, int]]
    filling: Mapping[int, list[int]]
    dropped_slots: Sequence[int]


class IndexJournal:
    """One record of 64 bytes for each slot of a pool, and `content`, what the records mean.

    A slot's life: `begin` (empty, and this session writes), `publish` (holds this key), `clear` (empty). The caller
    publishes a block once all ranks have its bytes, and begins a slot before it tells anybody to write there.

    Guarantees: whenever the writer dies, each record is what it was before the call under way, or what the call makes
    of it; with `publish` and `clear` it may also be empty. A block counts only if its checksum is right, which covers
    the whole record and is written last.

    Not locked: one thread at a time, of one process. The owner calls `close`. Clients never get it.
    """

    max_key_bytes = MAX_KEY_BYTES

    def __init__(self, fd: int, max_slots: int) -> None:
        """Takes over `fd`. Use `create` or `open`."""
        self.fd, self.max_slots = fd, max_slots
        self._memory = mmap.mmap(fd, _file_bytes(max_slots))
        self._memory.madvise(mmap.MADV_DONTFORK)
        words = np.frombuffer(self._memory, np.uint64, max_slots * WORDS, HEADER_BYTES)
        self._records: Words = words.reshape(max_slots, WORDS)
        self._salt = np.uint64(0)
        self._sequence = 0
        self._order = 0
        self._content: dict[str, Any] = {}

    @classmethod
    def create(cls, max_slots: int, content: Mapping[str, Any]) -> Self:
        """An empty journal. `content` is stored as JSON. Raises `PinError`."""
        fd = create_memfd(JOURNAL_NAME, _file_bytes(max_slots))
        journal = cls(fd, max_slots)
        try:
            journal._salt = np.uint64(int.from_bytes(os.urandom(8), "little"))
            journal.write_content(content)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, fd: int) -> Self:
        """The journal of an earlier service; takes over `fd`. Raises `ForeignMemoryError` or `JournalError`, and then
        the caller still owns `fd`. The caller compares `content` with its pool and calls `recover`."""
        num_bytes = os.fstat(fd).st_size
        require_memfd(fd, JOURNAL_NAME, num_bytes)
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as memory:
            sequence, found = read_header(memory)
        if num_bytes != _file_bytes(found["max_slots"]):
            raise JournalError(f"the journal has {num_bytes} bytes, not those of {found['max_slots']} slots")
        journal = cls(fd, found["max_slots"])
        journal._salt, journal._sequence = np.uint64(found["salt"]), sequence
        journal._content = found["content"]
        return journal

    @property
    def content(self) -> Mapping[str, Any]:
        """What the caller last wrote here: the pool's identity, layout and namespaces."""
        return self._content

    @property
    def resident_bytes(self) -> int:
        """The memory that the journal takes now."""
        return os.fstat(self.fd).st_blocks * 512

    def write_content(self, content: Mapping[str, Any]) -> None:
        """Replace the content. Of two copies, the older one is overwritten, so there is always a whole one. Raises
        `JournalError` if it is too long."""
        found = {"max_slots": self.max_slots, "salt": int(self._salt), "content": content}
        header = write_header(self._memory, self._sequence + 1, found)
        self._sequence, self._content = header.sequence, header.found["content"]

    def name_namespaces(self, namespaces: Mapping[int, NamespaceLabel]) -> None:
        """See `SlotJournal`. Names the first of them, as many as fit."""
        listed: list[tuple[int, str, Any]] = []
        room = COPY_BYTES - len(json.dumps({**self._content, "namespaces": []})) - _OTHER_BYTES
        for tag, label in namespaces.items():
            room -= len(json.dumps([tag, *label])) + 1
            if room < 0:
                break
            listed.append((tag, *label))
        self.write_content({**self._content, "namespaces": listed})

    def namespaces(self) -> dict[int, NamespaceLabel]:
        """What `name_namespaces` has named."""
        return {tag: NamespaceLabel(name, note) for tag, name, note in self._content.get("namespaces", ())}

    def reserve(self, first_slot: int, end_slot: int) -> None:
        """Take the memory of these records now, so that writing them cannot fail. Raises `PinError`."""
        if first_slot >= end_slot:
            return
        if end_slot > self.max_slots:
            raise PinError(
                "out_of_memory", f"the journal of the index has room for {self.max_slots} slots, not {end_slot}"
            )
        num_bytes = (end_slot - first_slot) * RECORD_BYTES
        try:
            os.posix_fallocate(self.fd, HEADER_BYTES + first_slot * RECORD_BYTES, num_bytes)
        except OSError as error:
            size = format_size(num_bytes)
            raise PinError("out_of_memory", f"{size} for the journal of the index: {error.strerror}") from error

    def begin(self, slots: Sequence[int], session: int) -> None:
        """The session may use these slots; what they held is gone."""
        state = filling_state(session)
        rows = self._rows(slots)
        self._store(rows, STATE, state)  # first: at no moment does the slot look empty
        self._erase(rows)

    def publish(self, slots: Sequence[int], namespace: int, keys: Sequence[bytes]) -> None:
        """Each slot holds the block with the key beside it. All keys have one length, at most 40 bytes. Raises
        `IntegrityError` for a slot that was not begun."""
        if not slots:
            return
        rows = self._rows(slots)
        body = make_blocks(namespace, keys)
        if len(body) != len(rows):
            raise InvalidRequestError(f"{len(rows)} slots, but {len(body)} keys")
        present = self._records[rows, :KEY]
        if (present[:, COMMIT] != 0).any() or not is_filling(present).all():
            raise IntegrityError("a slot is published in the journal that was not begun")
        body[:, ORDER] = np.arange(self._order, self._order + len(rows), dtype=np.uint64)
        self._order += len(rows)
        commits = self._checksums(rows, body)
        self._store(rows, slice(STATE, WORDS), body[:, STATE:])
        self._store(rows, COMMIT, commits)

    def clear(self, slots: Sequence[int]) -> None:
        """The slots are empty, and nothing writes to them."""
        rows = self._rows(slots)
        self._erase(rows)
        self._store(rows, STATE, np.uint64(0))

    def recover(self) -> RecoveredIndex:
        """Read all records: 1 s for a million. Records that were cut off in the middle are made empty."""
        used = [np.flatnonzero(self._records[low:high, :KEY].any(axis=1)) + low for low, high in self._extents()]
        written = np.concatenate(used) if used else np.empty(0, np.intp)
        records = self._records[written]
        is_whole = (records[:, COMMIT] != 0) & (records[:, COMMIT] == self._checksums(written, records))
        is_begun = ~is_whole & is_filling(records)
        self._erase(written[~is_whole])
        self._store(written[~is_whole & ~is_begun], STATE, np.uint64(0))
        whole, rows = records[is_whole], written[is_whole]
        in_order = np.argsort(whole[:, ORDER], kind="stable")
        whole, rows = whole[in_order], rows[in_order]
        self._order = int(whole[-1, ORDER]) + 1 if len(whole) else 0
        blocks = read_blocks(whole, rows)
        dropped: list[int] = []
        if sum(map(len, blocks.values())) < len(rows):
            kept = {slot for of_namespace in blocks.values() for slot in of_namespace.values()}
            dropped = [slot for slot in rows.tolist() if slot not in kept]
            self.clear(dropped)
        filling: dict[int, list[int]] = {}
        for session, slot in zip(sessions_of(records[is_begun]), written[is_begun].tolist(), strict=True):
            filling.setdefault(session, []).append(slot)
        return RecoveredIndex(blocks, filling, dropped)

    def _extents(self) -> Iterator[tuple[int, int]]:
        """The records that have memory: to read others would take memory for them."""
        end = HEADER_BYTES
        while (start := _seek(self.fd, end, os.SEEK_DATA)) is not None:
            end = os.lseek(self.fd, start, os.SEEK_HOLE)
            low, high = (start - HEADER_BYTES) // RECORD_BYTES, -(-(end - HEADER_BYTES) // RECORD_BYTES)
            yield low, min(high, self.max_slots)

    def close(self) -> None:
        """Let go of the memory, which lives on as long as a keeper has it; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._records = np.empty((0, WORDS), np.uint64)
            self._memory.close()
            os.close(fd)

    def _rows(self, slots: Sequence[int]) -> NDArray[np.intp]:
        rows = np.asarray(slots, dtype=np.intp)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.max_slots):
            raise InvalidRequestError(f"slots from {rows.min()} to {rows.max()}; allowed: 0 to {self.max_slots - 1}")
        return rows

    def _erase(self, rows: NDArray[np.intp]) -> None:
        self._store(rows, COMMIT, np.uint64(0))

    def _store(self, rows: NDArray[np.intp], words: int | slice, values: Words | np.uint64) -> None:
        """All writes to records pass through here: each call is over before the next one begins."""
        self._records[rows, words] = values

    def _checksums(self, rows: NDArray[np.intp], records: Words) -> Words:
        return checksums(self._salt, rows, records)


def _seek(fd: int, offset: int, whence: int) -> int | None:
    """None if there is nothing from the offset on."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _file_bytes(max_slots: int) -> int:
    if max_slots <= 0:
        raise InvalidRequestError(f"max_slots is {max_slots}; allowed: 1 or more")
    return -(-(HEADER_BYTES + max_slots * RECORD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
