"""The journal of a pool's index: what each slot holds, in memory that outlives the process that writes it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstow.bytesize import format_size
from kvstow.control.slotjournal import NamespaceLabel
from kvstow.errors import IntegrityError, InvalidRequestError, JournalError, PinError
from kvstow.memfd import (
    OPEN_SEALS,
    READ_ONLY_SEALS,
    create_memfd,
    forbid_writing,
    is_read_only,
    require_memfd,
)

JOURNAL_NAME = "kvstow-journal"
RECORD_BYTES = 64
MAX_KEY_BYTES = 40
VERSION = 1

_MAGIC = b"KVSTOWIX"
_HEADER = struct.Struct("<8sIIQ")  # magic, version, length of the content, sequence; then the content and its CRC-32
_CRC = struct.Struct("<I")
_COPY_BYTES = 1 << 20  # of each of the two copies of the header; takes memory as far as it is written
_RECORDS_AT = 2 * _COPY_BYTES
_OTHER_BYTES = 256  # of a copy, besides the content

# The words of a record.
_WORDS = RECORD_BYTES // 8
_COMMIT, _STATE, _KEY, _ORDER = 0, 1, 2, 7
_FILLING = np.uint64(0xF111 << 48)  # in the state word: a session, its number in the lower bits, may be writing
_FILLING_MASK = np.uint64(0xFFFF << 48)
_MAX_SESSION = (1 << 48) - 1
_MAX_NAMESPACE = (1 << 32) - 1

# Odd constants of the record's checksum.
_FACTORS = [np.uint64(value) for value in (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93,
    0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
)]  # fmt: skip
_SHIFT = np.uint64(29)

_Words = NDArray[np.uint64]


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

    Not locked: one thread at a time, of one process. The owner calls `close`. Clients may get it after `protect`: then
    only this process can write it, and the next one that opens it writes to a copy.
    """

    max_key_bytes = MAX_KEY_BYTES

    def __init__(self, fd: int, max_slots: int) -> None:
        """Takes over `fd`. Use `create` or `open`."""
        self.fd, self.max_slots = fd, max_slots
        self._memory = mmap.mmap(fd, _file_bytes(max_slots))
        self._memory.madvise(mmap.MADV_DONTFORK)
        words = np.frombuffer(self._memory, np.uint64, max_slots * _WORDS, _RECORDS_AT)
        self._records: _Words = words.reshape(max_slots, _WORDS)
        self._salt = np.uint64(0)
        self._sequence = 0
        self._order = 0
        self._content: dict[str, Any] = {}
        self.is_protected = False
        """Whether others may have it."""

    @classmethod
    def create(cls, max_slots: int, content: Mapping[str, Any]) -> Self:
        """An empty journal. `content` is stored as JSON. Raises `PinError`."""
        fd = create_memfd(JOURNAL_NAME, _file_bytes(max_slots), seals=OPEN_SEALS)
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
        """The journal of an earlier service; takes over `fd`. One that is protected is copied: 70 ms for a million
        slots. Raises `ForeignMemoryError`, `JournalError` or `PinError`, and then the caller still owns `fd`. The
        caller compares `content` with its pool and calls `recover`."""
        num_bytes = os.fstat(fd).st_size
        is_protected = is_read_only(fd)
        require_memfd(fd, JOURNAL_NAME, num_bytes, seals=READ_ONLY_SEALS if is_protected else OPEN_SEALS)
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as memory:
            sequence, found = _read_content(memory)
        if num_bytes != _file_bytes(found["max_slots"]):
            raise JournalError(f"the journal has {num_bytes} bytes, not those of {found['max_slots']} slots")
        journal = cls(_copy_of(fd, num_bytes) if is_protected else fd, found["max_slots"])
        if is_protected:
            os.close(fd)
        journal._salt, journal._sequence = np.uint64(found["salt"]), sequence
        journal._content = found["content"]
        return journal

    @staticmethod
    def look(fd: int) -> Mapping[str, Any]:
        """The content of a protected journal. `fd` may come from any process; the caller keeps it. Raises
        `ForeignMemoryError` or `JournalError`."""
        num_bytes = os.fstat(fd).st_size
        require_memfd(fd, JOURNAL_NAME, num_bytes, seals=READ_ONLY_SEALS)
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as memory:
            content: Mapping[str, Any] = _read_content(memory)[1]["content"]
        return content

    @property
    def content(self) -> Mapping[str, Any]:
        """What the caller last wrote here: the pool's identity, layout and namespaces."""
        return self._content

    @property
    def resident_bytes(self) -> int:
        """The memory that the journal takes now."""
        return os.fstat(self.fd).st_blocks * 512

    def protect(self) -> None:
        """From now on only this object can write to the journal, even if others have the memfd. Raises `PinError`."""
        forbid_writing(self.fd)
        self.is_protected = True

    def write_content(self, content: Mapping[str, Any]) -> None:
        """Replace the content. Of two copies, the older one is overwritten, so there is always a whole one. Raises
        `JournalError` if it is too long."""
        found = {"max_slots": self.max_slots, "salt": int(self._salt), "content": content}
        body = json.dumps(found, separators=(",", ":")).encode()
        sequence = self._sequence + 1
        header = _HEADER.pack(_MAGIC, VERSION, len(body), sequence)
        data = header + body + _CRC.pack(zlib.crc32(header + body))
        if len(data) > _COPY_BYTES:
            raise JournalError(
                f"what the journal says of its pool takes {format_size(len(data))}; allowed: {format_size(_COPY_BYTES)}"
            )
        at = sequence % 2 * _COPY_BYTES
        self._memory[at : at + len(data)] = data
        self._sequence, self._content = sequence, json.loads(body)["content"]

    def name_namespaces(self, namespaces: Mapping[int, NamespaceLabel]) -> None:
        """See `SlotJournal`. Names the first of them, as many as fit."""
        listed: list[tuple[int, str, Any]] = []
        room = _COPY_BYTES - len(json.dumps({**self._content, "namespaces": []})) - _OTHER_BYTES
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
        try:
            os.posix_fallocate(self.fd, _RECORDS_AT + first_slot * RECORD_BYTES, (end_slot - first_slot) * RECORD_BYTES)
        except OSError as error:
            size = format_size((end_slot - first_slot) * RECORD_BYTES)
            raise PinError("out_of_memory", f"{size} for the journal of the index: {error.strerror}") from error

    def begin(self, slots: Sequence[int], session: int) -> None:
        """The session may use these slots; what they held is gone."""
        if not 0 <= session <= _MAX_SESSION:
            raise InvalidRequestError(f"session is {session}; allowed: 0 to {_MAX_SESSION}")
        rows = self._rows(slots)
        self._store(rows, _STATE, _FILLING | np.uint64(session))  # first: at no moment does the slot look empty
        self._erase(rows)

    def publish(self, slots: Sequence[int], namespace: int, keys: Sequence[bytes]) -> None:
        """Each slot holds the block with the key beside it. All keys have one length, at most 40 bytes. Raises
        `IntegrityError` for a slot that was not begun."""
        if not slots:
            return
        rows = self._rows(slots)
        body = self._make_body(namespace, keys)
        if len(body) != len(rows):
            raise InvalidRequestError(f"{len(rows)} slots, but {len(body)} keys")
        present = self._records[rows, :_KEY]
        if (present[:, _COMMIT] != 0).any() or (present[:, _STATE] & _FILLING_MASK != _FILLING).any():
            raise IntegrityError("a slot is published in the journal that was not begun")
        body[:, _ORDER] = np.arange(self._order, self._order + len(rows), dtype=np.uint64)
        self._order += len(rows)
        commits = self._checksums(rows, body)
        self._store(rows, slice(_STATE, _WORDS), body[:, _STATE:])
        self._store(rows, _COMMIT, commits)

    def clear(self, slots: Sequence[int]) -> None:
        """The slots are empty, and nothing writes to them."""
        rows = self._rows(slots)
        self._erase(rows)
        self._store(rows, _STATE, np.uint64(0))

    def recover(self) -> RecoveredIndex:
        """Read all records: 1 s for a million. Records that were cut off in the middle are made empty."""
        used = [np.flatnonzero(self._records[low:high, :_KEY].any(axis=1)) + low for low, high in self._extents()]
        written = np.concatenate(used) if used else np.empty(0, np.intp)
        records = self._records[written]
        is_whole = (records[:, _COMMIT] != 0) & (records[:, _COMMIT] == self._checksums(written, records))
        is_filling = ~is_whole & (records[:, _STATE] & _FILLING_MASK == _FILLING)
        self._erase(written[~is_whole])
        self._store(written[~is_whole & ~is_filling], _STATE, np.uint64(0))
        whole, rows = records[is_whole], written[is_whole]
        in_order = np.argsort(whole[:, _ORDER], kind="stable")
        whole, rows = whole[in_order], rows[in_order]
        self._order = int(whole[-1, _ORDER]) + 1 if len(whole) else 0
        blocks = _blocks_of(whole, rows)
        dropped: list[int] = []
        if sum(map(len, blocks.values())) < len(rows):
            kept = {slot for of_namespace in blocks.values() for slot in of_namespace.values()}
            dropped = [slot for slot in rows.tolist() if slot not in kept]
            self.clear(dropped)
        sessions = (records[is_filling, _STATE] & ~_FILLING_MASK).tolist()
        filling: dict[int, list[int]] = {}
        for session, slot in zip(sessions, written[is_filling].tolist(), strict=True):
            filling.setdefault(session, []).append(slot)
        return RecoveredIndex(blocks, filling, dropped)

    def _extents(self) -> Iterator[tuple[int, int]]:
        """The records that have memory: to read others would take memory for them."""
        end = _RECORDS_AT
        while (start := _seek(self.fd, end, os.SEEK_DATA)) is not None:
            end = os.lseek(self.fd, start, os.SEEK_HOLE)
            low, high = (start - _RECORDS_AT) // RECORD_BYTES, -(-(end - _RECORDS_AT) // RECORD_BYTES)
            yield low, min(high, self.max_slots)

    def close(self) -> None:
        """Let go of the memory, which lives on as long as a keeper has it; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._records = np.empty((0, _WORDS), np.uint64)
            self._memory.close()
            os.close(fd)

    def _rows(self, slots: Sequence[int]) -> NDArray[np.intp]:
        rows = np.asarray(slots, dtype=np.intp)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.max_slots):
            raise InvalidRequestError(f"slots from {rows.min()} to {rows.max()}; allowed: 0 to {self.max_slots - 1}")
        return rows

    def _erase(self, rows: NDArray[np.intp]) -> None:
        self._store(rows, _COMMIT, np.uint64(0))

    def _store(self, rows: NDArray[np.intp], words: int | slice, values: _Words | np.uint64) -> None:
        """All writes to records pass through here: each call is over before the next one begins."""
        self._records[rows, words] = values

    def _make_body(self, namespace: int, keys: Sequence[bytes]) -> _Words:
        """Records without order and checksum."""
        if not 0 <= namespace <= _MAX_NAMESPACE:
            raise InvalidRequestError(f"namespace is {namespace}; allowed: 0 to {_MAX_NAMESPACE}")
        width = len(keys[0]) if keys else 0
        if not 0 < width <= MAX_KEY_BYTES or any(len(key) != width for key in keys):
            raise InvalidRequestError(f"keys of the journal have one length, from 1 to {MAX_KEY_BYTES} bytes")
        body = np.zeros((len(keys), _WORDS), np.uint64)
        body[:, _STATE] = namespace | width << 32
        as_bytes = body.view(np.uint8)
        as_bytes[:, _KEY * 8 : _KEY * 8 + width] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), width)
        return body

    def _checksums(self, rows: NDArray[np.intp], records: _Words) -> _Words:
        """Of everything but the checksum itself, of the slot's number and of the journal; never 0."""
        sums: _Words = self._salt ^ (rows.astype(np.uint64) * _FACTORS[0])
        for word in range(_STATE, _WORDS):
            sums ^= records[:, word]
            sums *= _FACTORS[word]
            sums ^= sums >> _SHIFT
        sums[sums == 0] = 1
        return sums


def _copy_of(fd: int, num_bytes: int) -> int:
    """Memory of the same content, which takes as much."""
    copy = create_memfd(JOURNAL_NAME, num_bytes, seals=OPEN_SEALS)
    try:
        end: int = 0
        while (start := _seek(fd, end, os.SEEK_DATA)) is not None:
            end = os.lseek(fd, start, os.SEEK_HOLE)
            for at in range(start, end, _COPY_BYTES):
                os.pwrite(copy, os.pread(fd, min(_COPY_BYTES, end - at), at), at)
    except OSError as error:
        os.close(copy)
        raise PinError("out_of_memory", f"memory for a copy of the journal: {error.strerror}") from error
    return copy


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
    return -(-(_RECORDS_AT + max_slots * RECORD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _blocks_of(records: _Words, rows: NDArray[np.intp]) -> dict[int, dict[bytes, int]]:
    """By namespace: keys and slots. Of equal keys, the last one counts."""
    blocks: dict[int, dict[bytes, int]] = {}
    kinds = records[:, _STATE]
    for kind in np.unique(kinds).tolist():
        namespace, width = kind & _MAX_NAMESPACE, kind >> 32
        chosen = kinds == kind
        data = np.ascontiguousarray(records[chosen, _KEY:_ORDER]).view(np.uint8)[:, :width].tobytes()
        keys = (data[at : at + width] for at in range(0, len(data), width))
        blocks.setdefault(namespace, {}).update(zip(keys, rows[chosen].tolist(), strict=True))
    return blocks


def _read_content(memory: mmap.mmap) -> tuple[int, dict[str, Any]]:
    """Sequence and content of the newest whole copy."""
    if len(memory) < _RECORDS_AT:
        raise JournalError(f"the journal has {len(memory)} bytes and no header")
    copies = [copy for at in (0, _COPY_BYTES) if (copy := _read_copy(memory, at)) is not None]
    if not copies:
        raise JournalError("the journal has no whole header")
    sequence, version, body = max(copies)
    if version != VERSION:
        raise JournalError(f"the journal has version {version}; this service reads version {VERSION}")
    found: dict[str, Any] = json.loads(body)
    return sequence, found


def _read_copy(memory: mmap.mmap, at: int) -> tuple[int, int, bytes] | None:
    """Sequence, version and body; None unless the copy is whole. Reads no more than it needs, as that takes memory."""
    magic, version, length, sequence = _HEADER.unpack_from(memory, at)
    end = _HEADER.size + length
    if magic != _MAGIC or end + _CRC.size > _COPY_BYTES:
        return None
    data = memory[at : at + end + _CRC.size]
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    return sequence, version, data[_HEADER.size : end]
