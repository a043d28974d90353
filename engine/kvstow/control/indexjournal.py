"""The journal of a pool's index: what each slot holds, in memory that outlives the process that writes it.

The header is JSON in two copies. A write replaces the older one, so one copy is always whole.

The record of a slot has eight words of 64 bits:

word 0        checksum of the other words, the slot's number and the journal's salt; 0 if the slot has no block
word 1        for a block, its namespace and the length of its key; for a slot that a session may write, the session
words 2 to 6  the key, of at most 40 bytes
word 7        for a block, its place in the order of publishing

After the records, there is a byte for each slot that says how often its block was used, and then what the pool has
learned, with a checksum. Both only influence what is evicted first, so a crash may leave an old value, or none.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstow.bytesize import format_size
from kvstow.control.namespaces import NamespaceLabel
from kvstow.errors import IntegrityError, InvalidRequestError, JournalError, PinError
from kvstow.memfd import create_memfd, require_memfd

VERSION = 1
COPY_BYTES = 1 << 20  # only pages that were written take memory
HEADER_BYTES = 2 * COPY_BYTES

_MAGIC = b"KVSTOWIX"
_START = struct.Struct("<8sIIQ")  # magic, version, length of the JSON, sequence; then the JSON and the CRC-32 of both
_CRC = struct.Struct("<I")

RECORD_BYTES = 64
WORDS = RECORD_BYTES // 8
COMMIT, STATE, KEY, ORDER = 0, 1, 2, 7
MAX_KEY_BYTES = 40
_MAX_NAMESPACE = (1 << 32) - 1
LEARNED_BYTES = 16 << 10
JOURNAL_NAME = "kvstow-journal"
_OTHER_BYTES = 256  # in a copy of the header, besides the content


class JournalHeader(NamedTuple):
    """The header of a journal. `sequence` counts the writes, so the newer copy has the larger one. `found`: the
    document."""

    sequence: int
    found: Mapping[str, Any]


def packed_copy(sequence: int, found: Mapping[str, Any], most_bytes: int = COPY_BYTES) -> bytes:
    """Return a copy of the document as bytes. Raises `JournalError` if it takes more than `most_bytes`."""
    body = json.dumps(found, separators=(",", ":")).encode()
    start = _START.pack(_MAGIC, VERSION, len(body), sequence)
    data = start + body + _CRC.pack(zlib.crc32(start + body))
    if len(data) > most_bytes:
        size = format_size(len(data))
        raise JournalError(f"the record takes {size}; allowed: {format_size(most_bytes)}")
    return data


def write_header(memory: mmap.mmap, sequence: int, found: Mapping[str, Any]) -> JournalHeader:
    """Overwrite the older copy. `sequence` is one more than that of the newer copy. Returns what `read_header` will
    return. Raises `JournalError`, and writes nothing, if the document is too long."""
    data = packed_copy(sequence, found)
    at = sequence % 2 * COPY_BYTES
    memory[at : at + len(data)] = data
    return JournalHeader(sequence, json.loads(data[_START.size : -_CRC.size]))


def read_header(memory: bytes | mmap.mmap, copy_bytes: int = COPY_BYTES) -> JournalHeader:
    """Return the newest whole copy. Raises `JournalError` if there is none, or if its version is another one."""
    if len(memory) < 2 * copy_bytes:
        raise JournalError(f"the journal has {len(memory)} bytes and no header")
    copies = [copy for at in (0, copy_bytes) if (copy := _read_copy(memory, at, copy_bytes)) is not None]
    if not copies:
        raise JournalError("the journal has no whole header")
    newest = max(copies)
    if newest.version != VERSION:
        raise JournalError(f"the journal has version {newest.version}; this service reads version {VERSION}")
    return JournalHeader(newest.sequence, json.loads(newest.body))


class _HeaderCopy(NamedTuple):
    """A whole copy of the header. `body` is JSON."""

    sequence: int
    version: int
    body: bytes


def _read_copy(memory: bytes | mmap.mmap, at: int, copy_bytes: int) -> _HeaderCopy | None:
    """Return the copy, or None if it is not whole. Reads no more than it needs, because reading takes memory."""
    magic, version, length, sequence = _START.unpack_from(memory, at)
    end = _START.size + length
    if magic != _MAGIC or end + _CRC.size > copy_bytes:
        return None
    data = memory[at : at + end + _CRC.size]
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    return _HeaderCopy(sequence, version, data[_START.size : end])


_FILLING = np.uint64(0xF111 << 48)
_FILLING_MASK = np.uint64(0xFFFF << 48)
_LEARNED = struct.Struct("<II")  # the length and the CRC-32 of what was learned, which follows

# Odd constants of the checksum.
_FACTORS = [np.uint64(value) for value in (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93,
    0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
)]  # fmt: skip
_SHIFT = np.uint64(29)

Words = NDArray[np.uint64]


def is_filling(records: Words) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = records[:, STATE] & _FILLING_MASK == _FILLING
    return found


def fit(keys: Sequence[bytes]) -> bool:
    """Whether all keys have one length that a record has room for, as a call of `IndexJournal.publish` requires."""
    widths = set(map(len, keys))
    return not widths or (len(widths) == 1 and 1 <= max(widths) <= MAX_KEY_BYTES)


def make_blocks(namespace: int, keys: Sequence[bytes]) -> Words:
    """Return records of blocks, without order and checksum. Raises `InvalidRequestError` if there are no keys or they
    do not fit."""
    width = len(keys[0]) if keys else 0
    if not width or not fit(keys):
        raise InvalidRequestError(f"keys of the journal have one length, from 1 to {MAX_KEY_BYTES} bytes")
    records = np.zeros((len(keys), WORDS), np.uint64)
    records[:, STATE] = namespace | width << 32
    as_bytes = records.view(np.uint8)
    as_bytes[:, KEY * 8 : KEY * 8 + width] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), width)
    return records


def read_blocks(records: Words, rows: NDArray[np.intp]) -> dict[int, dict[bytes, int]]:
    """Return the keys of each namespace with their slots. If a key occurs twice, its last record counts. `rows`: the
    slots of the records."""
    blocks: dict[int, dict[bytes, int]] = {}
    kinds = records[:, STATE]
    for kind in np.unique(kinds).tolist():
        namespace, width = kind & _MAX_NAMESPACE, kind >> 32
        chosen = kinds == kind
        data = np.ascontiguousarray(records[chosen, KEY:ORDER]).view(np.uint8)[:, :width].tobytes()
        keys = (data[at : at + width] for at in range(0, len(data), width))
        blocks.setdefault(namespace, {}).update(zip(keys, rows[chosen].tolist(), strict=True))
    return blocks


def checksums(salt: np.uint64, rows: NDArray[np.intp], records: Words) -> Words:
    """Return the checksum of each record, which is never 0. `salt`: that of the journal. `rows`: the slots of the
    records."""
    sums: Words = salt ^ (rows.astype(np.uint64) * _FACTORS[0])
    for word in range(STATE, WORDS):
        sums ^= records[:, word]
        sums *= _FACTORS[word]
        sums ^= sums >> _SHIFT
    sums[sums == 0] = 1
    return sums


@dataclass(frozen=True, slots=True)
class RecoveredIndex:
    """What a journal held when its writer ended.

    `blocks`: for the number of each namespace, its keys in the order in which they were published, and their slots.
    `filling`: for the number of each session, the slots that it may still be writing. All other slots are empty.
    `dropped_slots`: the older slots of blocks that had two; they are empty now.
    """

    blocks: Mapping[int, dict[bytes, int]]
    filling: Mapping[int, list[int]]
    dropped_slots: Sequence[int]


class IndexJournal:
    """One record of 64 bytes for each slot of a pool, and `content`, which says what the records mean.

    `begin` records that a slot is empty and that a session writes it, `publish` that it holds the block with a key, and
    `clear` that it is empty. The caller publishes a block once all ranks have its bytes, and begins a slot before any
    rank gets the op that writes it.

    Guarantees: whenever the writer dies, each record is what it was before the call under way, or what the call would
    have made of it. During `publish` and `clear`, it may also be empty. A block counts only if its checksum is right,
    which covers the whole record and is written last.

    Not locked: a pool uses it with its lock held. No call waits, and each is O(slots given). The owner calls `close`.
    Clients never get its memory.
    """

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
        self._pasts_at = HEADER_BYTES + max_slots * RECORD_BYTES
        self._learned_at = self._pasts_at + max_slots
        self.next_pasts = 0
        """The slot after those of the last call of `write_pasts`."""

    @classmethod
    def create(cls, max_slots: int, content: Mapping[str, Any]) -> Self:
        """Make an empty journal. `content` is stored as JSON. Raises `PinError` if there is no memory for it."""
        fd = create_memfd(JOURNAL_NAME, _file_bytes(max_slots))
        journal = cls(fd, max_slots)
        try:
            journal._salt = np.uint64(int.from_bytes(os.urandom(8), "little"))
            journal._take_memory(journal._learned_at, LEARNED_BYTES)
            journal.write_content(content)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, fd: int) -> Self:
        """Open the journal of an earlier service, and take over `fd`. Raises `ForeignMemoryError` or `JournalError`,
        and then the caller still owns `fd`. The caller compares `content` with its pool and calls `recover`."""
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
        """How much memory the journal takes now."""
        return os.fstat(self.fd).st_blocks * 512

    def write_content(self, content: Mapping[str, Any]) -> None:
        """Replace the content. This overwrites the older of two copies, so one copy is always whole. Raises
        `JournalError` if the content is too long."""
        found = {"max_slots": self.max_slots, "salt": int(self._salt), "content": content}
        header = write_header(self._memory, self._sequence + 1, found)
        self._sequence, self._content = header.sequence, header.found["content"]

    def name_namespaces(self, namespaces: Iterable[tuple[int, NamespaceLabel]]) -> None:
        """Record these namespaces with their numbers, the most important first, until the header is full. Blocks of
        namespaces that do not fit are not recovered."""
        listed: list[tuple[int, str, Any]] = []
        room = COPY_BYTES - len(json.dumps({**self._content, "namespaces": []})) - _OTHER_BYTES
        for tag, label in namespaces:
            room -= len(json.dumps([tag, *label])) + 1
            if room < 0:
                break
            listed.append((tag, *label))
        self.write_content({**self._content, "namespaces": listed})

    def namespaces(self) -> dict[int, NamespaceLabel]:
        """Return the namespaces that `name_namespaces` has recorded, by number."""
        return {tag: NamespaceLabel(name, note) for tag, name, note in self._content.get("namespaces", ())}

    def reserve(self, first_slot: int, end_slot: int) -> None:
        """Take the memory of these records now, so that writing them cannot fail. Raises `PinError`."""
        if first_slot >= end_slot:
            return
        if end_slot > self.max_slots:
            raise PinError(
                "out_of_memory", f"the journal of the index has room for {self.max_slots} slots, not {end_slot}"
            )
        num_slots = end_slot - first_slot
        self._take_memory(HEADER_BYTES + first_slot * RECORD_BYTES, num_slots * RECORD_BYTES)
        self._take_memory(self._pasts_at + first_slot, num_slots)

    def _take_memory(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            size = format_size(num_bytes)
            raise PinError("out_of_memory", f"{size} for the journal of the index: {error.strerror}") from error

    def begin(self, slots: Sequence[int], session: int) -> None:
        """Record that the slots are empty and that the session may write them."""
        rows = self._rows(slots)
        self._store(rows, STATE, _FILLING | np.uint64(session))  # first, so that the slot never looks empty
        self._erase(rows)

    def publish(self, slots: Sequence[int], namespace: int, keys: Sequence[bytes]) -> None:
        """Record that each slot holds the block with the key in the same position. All keys have one length, at most 40
        bytes. Raises `IntegrityError` for a slot that was not begun."""
        if not slots:
            return
        rows = self._rows(slots)
        body = make_blocks(namespace, keys)
        present = self._records[rows, :KEY]
        if (present[:, COMMIT] != 0).any() or not is_filling(present).all():
            raise IntegrityError("a slot is published in the journal, but it was not begun")
        body[:, ORDER] = np.arange(self._order, self._order + len(rows), dtype=np.uint64)
        self._order += len(rows)
        commits = self._checksums(rows, body)
        self._store(rows, slice(STATE, WORDS), body[:, STATE:])
        self._store(rows, COMMIT, commits)

    def clear(self, slots: Sequence[int]) -> None:
        """Record that the slots are empty and that no session writes them."""
        rows = self._rows(slots)
        self._erase(rows)
        self._store(rows, STATE, np.uint64(0))

    def write_pasts(self, first_slot: int, pasts: bytes) -> None:
        """Record the pasts (`kvstow.control.hazards`) of the blocks in the slots from `first_slot` on, a byte for each.
        The slots must have been reserved."""
        at = self._pasts_at + first_slot
        self._memory[at : at + len(pasts)] = pasts
        self.next_pasts = first_slot + len(pasts)

    def pasts(self, num_slots: int) -> bytes:
        """Return what `write_pasts` has recorded for the slots below `num_slots`, which must have been reserved. A past
        may be that of an earlier block in the slot."""
        return self._memory[self._pasts_at : self._pasts_at + num_slots]

    def write_learned(self, learned: bytes) -> None:
        """Record what the pool has learned from its traffic, in place of the last such record. Has no effect if it is
        too long."""
        if len(learned) <= LEARNED_BYTES - _LEARNED.size:
            data = _LEARNED.pack(len(learned), zlib.crc32(learned)) + learned
            self._memory[self._learned_at : self._learned_at + len(data)] = data

    def learned(self) -> bytes:
        """Return what `write_learned` has recorded. Empty if there is no such record, or if it is damaged."""
        length, checksum = _LEARNED.unpack_from(self._memory, self._learned_at)
        start = self._learned_at + _LEARNED.size
        found = self._memory[start : start + length] if length <= LEARNED_BYTES - _LEARNED.size else b""
        return found if zlib.crc32(found) == checksum else b""

    def recover(self) -> RecoveredIndex:
        """Read all records, which takes 1 s for a million. Records whose writing was interrupted are made empty."""
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
        sessions = (records[is_begun, STATE] & ~_FILLING_MASK).tolist()
        for session, slot in zip(sessions, written[is_begun].tolist(), strict=True):
            filling.setdefault(session, []).append(slot)
        return RecoveredIndex(blocks, filling, dropped)

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of records that have memory. To read others would take memory for them."""
        end = HEADER_BYTES
        while (start := _seek(self.fd, end, os.SEEK_DATA)) is not None:
            end = os.lseek(self.fd, start, os.SEEK_HOLE)
            low, high = (start - HEADER_BYTES) // RECORD_BYTES, -(-(end - HEADER_BYTES) // RECORD_BYTES)
            if low >= self.max_slots:
                return
            yield low, min(high, self.max_slots)

    def close(self) -> None:
        """Close the memory, which lives on as long as another process keeps it. Idempotent."""
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
        """Write these words. All writes to records pass through here, so each is over before the next one begins."""
        self._records[rows, words] = values

    def _checksums(self, rows: NDArray[np.intp], records: Words) -> Words:
        return checksums(self._salt, rows, records)


def _seek(fd: int, offset: int, whence: int) -> int | None:
    """Return where data, or a hole, begins at or after the offset; None if neither does."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _file_bytes(max_slots: int) -> int:
    if max_slots <= 0:
        raise InvalidRequestError(f"max_slots is {max_slots}; allowed: 1 or more")
    num_bytes = HEADER_BYTES + max_slots * (RECORD_BYTES + 1) + LEARNED_BYTES
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
