"""Writes, reads, verifies and removes the blocks in the two files of a path.

A place gets a block in three steps: its record says `dirty`, then the data is written, and then the record names the
block. So if this process is killed at any moment, every valid record has data that was written whole. After a power
cut, any part of the data that was not synced may be missing, and the checksum of the block decides. It is seeded with
the digest of the block's name, so that data of another block, in a place where it does not belong, is detected, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from kvstow_service.stores.disk import diskformat
from kvstow_service.stores.disk.diskfiles import DiskFiles
from kvstow_service.stores.disk.diskformat import (
    CHUNK_BYTES,
    DIRTY,
    HEADER_BYTES,
    MOST_CHUNKS,
    RECORD_BYTES,
    USE_BYTES,
    WRITTEN,
    ChunkEntry,
    Header,
    Record,
)
from kvstow_service.stores.disk.places import Assignment, BlockName, FoundChunk, Place

_PIECE_BYTES = 1 << 20
"""The bytes of one call of the checksum. Such calls release the GIL from 256 KiB on."""
_MIN_CHUNKS = 64
"""A small disk has smaller chunks, so that it has this many. Each chunk holds blocks of one size and one owner."""


class BlockPart(NamedTuple):
    """A rank's part of a block: the slot, padded to the alignment, and how many of its bytes count."""

    buffer: memoryview
    num_bytes: int


ReadResult = Literal["read", "missing", "corrupt"]


class FoundFiles(NamedTuple):
    """What the files of a path contain at a start."""

    header: Header
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

    def __init__(self, files: DiskFiles, header: Header) -> None:
        """Use `open`."""
        self._files, self.header = files, header
        self._lock = Lock()
        """Guards the header."""

    @classmethod
    def open(
        cls, files: DiskFiles, size_bytes: int | None, default_bytes: int, alignment: int, boot: bytes
    ) -> BlockFile:
        """Open the files. `size_bytes`: the size of the data file; None keeps its size, or is `default_bytes` for a new
        file. `boot`: see `boot_id`. Raises `FormatError`, and changes nothing, for files of another format."""
        data = files.read_records(0, 2 * HEADER_BYTES)
        if data != bytes(len(data)):
            before = diskformat.read_header(data)
        else:
            size_bytes = default_bytes if size_bytes is None else size_bytes
            before = Header(0, 0, chunk_bytes_for(size_bytes, alignment), alignment, 0, True, boot, {})
        opened, num_chunks = cls(files, before), before.num_chunks
        if size_bytes is not None:
            num_chunks = max(1, min(MOST_CHUNKS, size_bytes // before.chunk_bytes))
        chunks = {
            chunk: entry if chunk < num_chunks else ChunkEntry(entry.generation, None)
            for chunk, entry in before.chunks.items()
        }
        if num_chunks < before.num_chunks:  # the header first, so that no record points behind the end of the data
            opened._change_header(num_chunks=num_chunks, chunks=chunks)
        files.resize(num_chunks * before.chunk_bytes, before.records_at(num_chunks))
        opened._finish_assignments(num_chunks)
        was_cut = before.boot != boot and not before.is_clean
        if was_cut:
            opened._forget_the_unsynced()
        opened._change_header(
            num_chunks=num_chunks, chunks=chunks, epoch=before.epoch + was_cut, is_clean=False, boot=boot
        )
        return opened

    def _forget_the_unsynced(self) -> None:
        """Mark all places without a block as dirty, because after a power cut they may hold bytes of blocks whose
        records were lost."""
        for one in self._assigned():
            records, is_valid = self._records_of(one)
            is_lost = ~is_valid | (records["state"] != WRITTEN)
            lost = diskformat.with_dirty(records, is_lost, one.chunk, one.generation)
            self._files.write_records(self.header.records_at(one.chunk), lost)

    def _finish_assignments(self, num_chunks: int) -> None:
        """Overwrite chunks that were between two kinds when their process was killed. They have no kind now."""
        for chunk, entry in self.header.chunks.items():
            if entry.kind is None and chunk < num_chunks:
                self._zero_chunk(chunk)

    def load(self) -> FoundFiles:
        """Return what the files contain. O(places)."""
        return FoundFiles(self.header, [self._load_chunk(one) for one in self._assigned()])

    def _load_chunk(self, assignment: Assignment) -> FoundChunk:
        records, is_valid = self._records_of(assignment)
        uses_at = self.header.uses_at(assignment.chunk)
        uses = np.frombuffer(self._files.read_records(uses_at, len(records) * USE_BYTES), "<u4")
        indices = np.flatnonzero(is_valid & (records["state"] == WRITTEN))
        chosen = records[indices]
        written = chosen["written_at"].astype(np.float64)
        return FoundChunk(
            assignment,
            indices,
            chosen["digest"].tobytes(),
            chosen["namespace"],
            chosen["key_start"],
            written,
            np.maximum(written, uses[indices]),
            np.flatnonzero(is_valid & (records["state"] == DIRTY)),
        )

    def _assigned(self) -> list[Assignment]:
        """Return all chunks that have places."""
        chunks = self.header.chunks.items()
        return [Assignment(chunk, one.kind, one.generation) for chunk, one in chunks if one.kind is not None]

    def _records_of(self, assignment: Assignment) -> tuple[Any, Any]:
        """Return the records of a chunk as an array, and which of them are valid."""
        chunk, kind, generation = assignment
        num_bytes = self.header.chunk_bytes // kind.place_bytes * RECORD_BYTES
        data = self._files.read_records(self.header.records_at(chunk), num_bytes)
        return diskformat.valid_records(data, chunk, generation)

    # -- blocks ---------------------------------------------------------------------------------------------

    def write(
        self, place: Place, block: BlockName, parts: Sequence[BlockPart], is_lent: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a block, and return whether it was written. `is_lent` is called when the bytes have been read from
        memory, and says whether the memory held this block until then. If it did not, the block is not found later."""
        self._write_record(place, Record(state=DIRTY, generation=place.generation))
        self._files.write_data([part.buffer for part in parts], place.offset)
        checksum = checksum_of(block.digest, parts)
        if not is_lent():
            return False
        record = Record(
            block.digest,
            checksum,
            block.key_start,
            block.namespace,
            place.generation,
            self.header.epoch,
            int(time.time()),
            WRITTEN,
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
        found = BlockName(record.digest, record.namespace, record.key_start)
        if (record.state, record.generation, found) != (WRITTEN, place.generation, block):
            return "missing"
        self._files.read_data([part.buffer for part in parts], place.offset)
        if checksum_of(block.digest, parts) == record.checksum:
            return "read"
        return "corrupt" if record.epoch == self.header.epoch else "missing"

    def mark_dirty(self, places: Iterable[Place]) -> None:
        """Mark these places as dirty. When this returns, none of their blocks is ever found again, whatever happens to
        the machine."""
        for place in places:
            self._write_record(place, Record(state=DIRTY, generation=place.generation))
        self._files.sync_records()

    def overwrite(self, places: Sequence[Place], place_bytes: int) -> None:
        """Overwrite dirty places, all of this size, with zeros. They are empty then."""
        ordered = sorted(places, key=lambda place: place.offset)
        first = 0
        for at, place in enumerate(ordered):
            if at + 1 == len(ordered) or ordered[at + 1].offset != place.offset + place_bytes:
                start = ordered[first].offset
                self._files.zero_data(start, place.offset + place_bytes - start)
                first = at + 1
        self._files.sync()
        for place in ordered:
            self._write_record(place, Record(generation=place.generation))

    def assign(self, assignment: Assignment) -> None:
        """Give a chunk places of another kind, and overwrite everything that it held."""
        chunk, kind, generation = assignment
        self._set_chunk(chunk, ChunkEntry(generation, None))
        self._zero_chunk(chunk)
        self._set_chunk(chunk, ChunkEntry(generation, kind))

    def write_uses(self, chunk: int, first: int, times: bytes) -> None:
        """Write the times of last use of the places of a chunk from `first` on, 4 bytes each."""
        self._files.write_records(self.header.uses_at(chunk) + first * USE_BYTES, times)

    def sync(self) -> None:
        """Let everything that was written until now survive a power cut."""
        self._files.sync()

    def probe(self) -> None:
        """Write and read a little. Raises `OSError` if the disk does not work."""
        with self._lock:
            self._change_header()
            packed = self.header.pack()
            if self._files.read_records(self.header.at, len(packed)) != packed:
                raise OSError("its files do not keep what is written")

    def close(self) -> None:
        """Sync everything, and close the files. No other call is under way."""
        try:
            self._files.sync()
            self._change_header(is_clean=True)
        finally:
            self._files.close()

    def _set_chunk(self, chunk: int, entry: ChunkEntry) -> None:
        with self._lock:
            self._change_header(chunks={**self.header.chunks, chunk: entry})

    def _change_header(self, **changes: Any) -> None:
        header = replace(self.header, sequence=self.header.sequence + 1, **changes)
        self._files.write_records(header.at, header.pack())
        self._files.sync_records()
        self.header = header

    def _zero_chunk(self, chunk: int) -> None:
        self._files.zero_data(chunk * self.header.chunk_bytes, self.header.chunk_bytes)

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
