"""Blocks in the two files of a path: how they are written, read, verified and removed.

A place gets a block in three steps: its record says `dirty`, then the data is written, and then the record names the
block. So if this process is killed at any moment, every valid record has data that was written whole. After a power
cut, any part of the data that was not synced may be missing, and the checksum of the block decides. It is seeded with
the digest of the block's name, so that data of another block, in a place where it does not belong, is detected, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from kvstow_service.stores.disk import diskformat
from kvstow_service.stores.disk.diskfiles import PathFiles
from kvstow_service.stores.disk.diskformat import (
    CHUNK_BYTES,
    DIRTY,
    EMPTY,
    HEADER_BYTES,
    MOST_CHUNKS,
    MOST_NAMESPACES,
    NAMESPACES_AT,
    RECORD_BYTES,
    WRITTEN,
    ChunkEntry,
    Header,
    NamespaceEntry,
    Record,
)
from kvstow_service.stores.disk.places import Assignment, BlockName, FoundChunk, Place, PlaceKind

_PIECE_BYTES = 1 << 20
"""The bytes of one call of the checksum. Such calls release the GIL from 256 KiB on."""
_MIN_CHUNKS = 64
"""A small disk has smaller chunks, so that several lengths can share it."""


class BlockPart(NamedTuple):
    """A rank's part of a block: the slot, padded to the alignment, and how many of its bytes count."""

    buffer: memoryview
    num_bytes: int


ReadResult = Literal["read", "missing", "corrupt"]


class FoundFiles(NamedTuple):
    """What the files of a path contain at a start. `namespaces`: the entries by row of their table. `generations`: by
    chunk."""

    header: Header
    namespaces: dict[int, NamespaceEntry]
    generations: dict[int, int]
    chunks: list[FoundChunk]


def boot_id() -> bytes:
    """Return 16 bytes that differ between the boots of the machine."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def chunk_bytes_for(size_bytes: int, alignment: int) -> int:
    """Return the size of a chunk: 1 GiB, or less on a small disk."""
    size = CHUNK_BYTES
    while size > max(alignment, 1 << 20) and size * _MIN_CHUNKS > size_bytes:
        size //= 2
    return max(size, alignment)


class BlockFile:
    """Thread-safe. Every call may wait for the disk, and raises `OSError` if the disk does not work. The caller makes
    no two calls at the same time that concern the same place, except reads."""

    def __init__(self, files: PathFiles, header: Header) -> None:
        """Use `open`."""
        self._files, self.header = files, header
        self._lock = Lock()
        self._changes = self._under_way = 0

    @classmethod
    def open(
        cls, files: PathFiles, size_bytes: int | None, default_bytes: int, alignment: int, boot: bytes
    ) -> BlockFile:
        """Open the files. `size_bytes`: the size of the data file; None keeps its size, or is `default_bytes` for a new
        file. `boot`: see `boot_id`. Raises `FormatError`, and changes nothing, for files of another format."""
        data = files.read_records(0, 2 * HEADER_BYTES)
        if any(data):
            before = diskformat.read_header(data)
        else:
            wanted = default_bytes if size_bytes is None else size_bytes
            chunk_bytes = chunk_bytes_for(wanted, alignment)
            before = Header(0, 0, chunk_bytes, alignment, 0, True, boot)
            size_bytes = wanted
        num_chunks = before.num_chunks
        if size_bytes is not None:
            num_chunks = max(1, min(MOST_CHUNKS, size_bytes // before.chunk_bytes))
        was_cut = before.boot != boot and not before.is_clean
        header = before._replace(
            sequence=before.sequence + 1,
            num_chunks=num_chunks,
            epoch=before.epoch + was_cut,
            is_clean=False,
            boot=boot,
        )
        if num_chunks < before.num_chunks:  # the header first, so that no record points behind the end of the data
            files.write_records(header.at, header.pack())
            files.sync_records()
        files.resize(num_chunks * header.chunk_bytes, header.records_end)
        opened = cls(files, header)
        opened._finish_assignments()
        if was_cut:
            opened._forget_the_unsynced()
        files.write_records(header.at, header.pack())
        files.sync_records()
        return opened

    def _forget_the_unsynced(self) -> None:
        """Mark all places without a block as dirty, because after a power cut they may hold bytes of blocks whose
        records were lost."""
        for chunk, entry in self._chunk_entries().items():
            at, count = self.header.records_at(chunk), self._num_places(entry)
            data = self._files.read_records(at, count * RECORD_BYTES)
            records, is_valid = diskformat.valid_records(data, chunk, entry.generation)
            is_lost = ~is_valid | (records["state"] != WRITTEN)
            self._files.write_records(at, diskformat.with_dirty(records, is_lost, chunk, entry.generation))

    def _finish_assignments(self) -> None:
        """Overwrite chunks that were between two kinds when their process was killed. They have no kind now."""
        for chunk, entry in self._chunk_entries().items():
            if not entry.place_bytes:
                self._files.zero_data(chunk * self.header.chunk_bytes, self.header.chunk_bytes)

    def load(self) -> FoundFiles:
        """Return what the files contain. O(places)."""
        entries = self._chunk_entries()
        namespaces = self._files.read_records(NAMESPACES_AT, diskformat.CHUNKS_AT - NAMESPACES_AT)
        known = diskformat.read_namespaces(namespaces)
        numbers = np.array([one.number for one in known.values()], np.uint32)
        chunks = [
            self._load_chunk(chunk, entry, numbers)
            for chunk, entry in entries.items()
            if entry.place_bytes and chunk < self.header.num_chunks
        ]
        return FoundFiles(self.header, known, {chunk: one.generation for chunk, one in entries.items()}, chunks)

    def _load_chunk(self, chunk: int, entry: ChunkEntry, numbers: Any) -> FoundChunk:
        count, header = self._num_places(entry), self.header
        data = self._files.read_records(header.records_at(chunk), count * RECORD_BYTES)
        uses = np.frombuffer(self._files.read_records(header.uses_at(chunk), count * 4), "<u4")
        records, is_valid = diskformat.valid_records(data, chunk, entry.generation)
        is_written = is_valid & (records["state"] == WRITTEN)
        is_found = is_written & np.isin(records["namespace"], numbers)
        indices = np.flatnonzero(is_found)
        chosen = records[indices]
        written = chosen["written_at"].astype(np.float64)
        return FoundChunk(
            Assignment(chunk, PlaceKind(entry.owner, entry.place_bytes), entry.generation),
            indices,
            chosen["digest"].tobytes(),
            chosen["namespace"],
            chosen["key_start"],
            written,
            np.maximum(written, uses[indices]),
            np.flatnonzero((is_valid & (records["state"] == DIRTY)) | (is_written & ~is_found)),
        )

    def _chunk_entries(self) -> dict[int, ChunkEntry]:
        size = diskformat.chunk_at(self.header.num_chunks) - diskformat.CHUNKS_AT
        return diskformat.read_chunks(self._files.read_records(diskformat.CHUNKS_AT, size))

    def _num_places(self, entry: ChunkEntry) -> int:
        if not entry.place_bytes:
            return 0
        return min(self.header.most_places, self.header.chunk_bytes // entry.place_bytes)

    # -- blocks ---------------------------------------------------------------------------------------------

    def write(
        self, place: Place, block: BlockName, parts: Sequence[BlockPart], is_lent: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a block, and return whether it was written. `is_lent` is called when the bytes have been read from
        memory, and says whether the memory held this block until then. If it did not, the block is not found later."""
        with self._change():
            self._write_record(place, Record(DIRTY, place.generation))
            self._files.write_data([part.buffer for part in parts], place.offset)
            checksum = checksum_of(block.digest, parts)
            if not is_lent():
                return False
            now = int(time.time())
            record = Record(
                WRITTEN,
                place.generation,
                block.digest,
                checksum,
                block.key_start,
                block.namespace,
                self.header.epoch,
                now,
            )
            self._write_record(place, record)
            return True

    def read(self, place: Place, block: BlockName, parts: Sequence[BlockPart]) -> ReadResult:
        """Fill the parts with a block, and verify it. Returns `missing` if the place has no such block, or if a power
        cut may have damaged it. Returns `corrupt` if its record is damaged, or if its bytes are although it was written
        after the last power cut."""
        at = self.header.records_at(place.chunk) + place.number * RECORD_BYTES
        record = Record.read(self._files.read_records(at, RECORD_BYTES), place.chunk, place.number)
        if record is None:
            return "corrupt"
        is_this = (
            record.state == WRITTEN
            and record.generation == place.generation
            and record.digest == block.digest
            and record.namespace == block.namespace
        )
        if not is_this:
            return "missing"
        self._files.read_data([part.buffer for part in parts], place.offset)
        if checksum_of(block.digest, parts) == record.checksum:
            return "read"
        return "corrupt" if record.epoch == self.header.epoch else "missing"

    def mark_dirty(self, places: Iterable[Place]) -> None:
        """Mark these places as dirty. When this returns, none of their blocks is ever found again, whatever happens to
        the machine."""
        with self._change():
            for place in places:
                self._write_record(place, Record(DIRTY, place.generation))
            self._files.sync_records()

    def overwrite(self, places: Sequence[Place], place_bytes: int) -> None:
        """Overwrite dirty places, all of this size, with zeros. They are empty then."""
        with self._change():
            ordered = sorted(places, key=lambda place: place.offset)
            first = 0
            for at, place in enumerate(ordered):
                if at + 1 == len(ordered) or ordered[at + 1].offset != place.offset + place_bytes:
                    start = ordered[first].offset
                    self._files.zero_data(start, place.offset + place_bytes - start)
                    first = at + 1
            self._files.sync()
            for place in ordered:
                self._write_record(place, Record(EMPTY, place.generation))

    # -- tables ---------------------------------------------------------------------------------------------

    def assign(self, assignment: Assignment) -> None:
        """Give a chunk places of another kind, and overwrite everything that it held."""
        chunk, kind, generation = assignment
        with self._change():
            for place_bytes in (0, kind.place_bytes):
                entry = ChunkEntry(place_bytes, generation, kind.owner)
                self._files.write_records(diskformat.chunk_at(chunk), entry.pack(chunk))
                self._files.sync_records()
                if not place_bytes:
                    self._files.zero_data(chunk * self.header.chunk_bytes, self.header.chunk_bytes)

    def add_namespace(self, row: int, entry: NamespaceEntry) -> None:
        assert row < MOST_NAMESPACES
        with self._change():
            self._files.write_records(diskformat.namespace_at(row), entry.pack())

    def write_uses(self, chunk: int, first: int, times: bytes) -> None:
        """Write the times of last use of the places of a chunk from `first` on, 4 bytes each."""
        self._files.write_records(self.header.uses_at(chunk) + first * diskformat.USE_BYTES, times)

    def sync(self) -> None:
        """Let everything that was written until now survive a power cut."""
        with self._lock:
            changes, was_quiet = self._changes, not self._under_way
        self._files.sync()
        with self._lock:
            if was_quiet and self._changes == changes and not self.header.is_clean:
                self._set_clean(True)

    def are_removed(self) -> bool:
        return self._files.are_removed()

    def probe(self) -> None:
        """Write and read a little. Raises `OSError` if the disk does not work."""
        with self._lock:
            self._set_clean(self.header.is_clean)
        if self._files.read_records(self.header.at, HEADER_BYTES) != self.header.pack():
            raise OSError("its files do not keep what is written")

    def close(self, *, is_synced: bool = True) -> None:
        """Close the files. `is_synced`: sync everything before that, which is possible if no other call is under
        way."""
        try:
            if is_synced:
                self._files.sync()
                with self._lock:
                    self._set_clean(True)
        finally:
            self._files.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Enclose a change. During it, and until everything is synced, the header says that a power cut would lose
        something."""
        with self._lock:
            self._changes += 1
            self._under_way += 1
            if self.header.is_clean:
                self._set_clean(False)
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def _set_clean(self, is_clean: bool) -> None:
        header = self.header._replace(sequence=self.header.sequence + 1, is_clean=is_clean)
        self._files.write_records(header.at, header.pack())
        self._files.sync_records()
        self.header = header

    def _write_record(self, place: Place, record: Record) -> None:
        at = self.header.records_at(place.chunk) + place.number * RECORD_BYTES
        self._files.write_records(at, record.pack(place.chunk, place.number))


def checksum_of(digest: bytes, parts: Sequence[BlockPart]) -> int:
    """Return the checksum of a block without its padding. `digest`: that of the block's name. Takes 100 us for each
    MiB."""
    state = xxhash.xxh3_64(seed=int.from_bytes(digest[:8], "little"))
    for part in parts:
        for at in range(0, part.num_bytes, _PIECE_BYTES):
            state.update(part.buffer[at : min(at + _PIECE_BYTES, part.num_bytes)])
    checksum: int = state.intdigest()
    return checksum
