"""What is in the two files of a path, byte by byte.

`data` is an array of chunks, and holds only blocks. `records` says which blocks these are:

    header, twice      HEADER_BYTES each, mostly a hole; the valid copy with the higher number counts
    for each chunk     a record of 64 bytes and a time of last use of 4 bytes for as many places as a chunk may have

The file has holes where no chunk has places. Everything that was written only in part, or never, has a wrong checksum
and counts as absent. The record of a place also counts as absent if its generation is not that of the chunk.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

MAGIC: Final = b"KVSTOWDK"
VERSION: Final = 3
HEADER_BYTES: Final = 3 << 20
"""As many chunks as a file may have fit in, even if each of them has a kind of its own."""
MOST_CHUNKS: Final = 65_536
MIN_ALIGNMENT: Final = 4096
CHUNK_BYTES: Final = 1 << 30
RECORD_BYTES: Final = 64
USE_BYTES: Final = 4

EMPTY, DIRTY, WRITTEN = 0, 1, 2
"""States of a record. The place of a dirty one may hold bytes of a block that was removed."""

RECORD: Final = np.dtype(
    [
        ("digest", "V16"),
        ("checksum", "<u8"),
        ("key_start", "<u8"),
        ("namespace", "<u8"),
        ("generation", "<u4"),
        ("epoch", "<u4"),
        ("written_at", "<u4"),
        ("state", "<u4"),
        ("own", "<u8"),
    ]
)
_ONE_RECORD = struct.Struct("<16sQQQIIIIQ")
assert RECORD.itemsize == _ONE_RECORD.size == RECORD_BYTES
_WORDS = RECORD_BYTES // 8 - 1
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15


class FormatError(Exception):
    """The files were not written by this version. They are left as they are."""


class PlaceKind(NamedTuple):
    """What the places of a chunk have in common. `identity`: see `StoredLayout`. `place_bytes`: the size of a block
    with the parts of all ranks, each padded to the alignment of the file."""

    owner: str
    identity: str
    place_bytes: int


class ChunkEntry(NamedTuple):
    """The generation and the kind of a chunk's places. `kind` is None while the chunk is between two kinds."""

    generation: int
    kind: PlaceKind | None


class Header(msgspec.Struct, frozen=True):
    """`sequence`: grows with each change of the header. `epoch`: grows when records may have been lost, by a power cut.
    `is_clean`: whether the files were closed after everything was synced. `boot`: the machine's boot in which it was
    written. `chunks`: all chunks that have ever had places."""

    sequence: int
    num_chunks: int
    chunk_bytes: int
    alignment: int
    epoch: int
    is_clean: bool
    boot: bytes
    chunks: dict[int, ChunkEntry]

    def pack(self) -> bytes:
        body = zlib.compress(msgspec.msgpack.encode(self))  # entries of chunks are much alike
        return _BEFORE_HEADER.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body

    @property
    def at(self) -> int:
        """The offset at which this copy is written."""
        return self.sequence % 2 * HEADER_BYTES

    @property
    def most_places(self) -> int:
        """How many places a chunk may have."""
        return self.chunk_bytes // self.alignment

    def records_at(self, chunk: int) -> int:
        """Return where the records of a chunk begin. Those of the chunk after the last one begin at the end."""
        area = padded(self.most_places * (RECORD_BYTES + USE_BYTES), MIN_ALIGNMENT)
        return 2 * HEADER_BYTES + chunk * area

    def uses_at(self, chunk: int) -> int:
        return self.records_at(chunk) + self.most_places * RECORD_BYTES


_BEFORE_HEADER = struct.Struct("<8sIIQ")  # last: the length and the checksum of what follows


def read_header(data: bytes) -> Header:
    """Return the newest valid copy. `data`: both copies. Raises `FormatError` if there is none."""
    found: list[Header] = []
    versions = set[int]()
    for at in (0, HEADER_BYTES):
        magic, version, num_bytes, own = _BEFORE_HEADER.unpack_from(data, at)
        at += _BEFORE_HEADER.size
        body = data[at : at + num_bytes]
        if magic == MAGIC:
            versions.add(version)
            if version == VERSION and own == xxhash.xxh3_64_intdigest(body):
                found.append(msgspec.msgpack.decode(zlib.decompress(body), type=Header))
    if found:
        return max(found, key=lambda one: one.sequence)
    if versions and VERSION not in versions:
        raise FormatError(f"its files have format {min(versions)}, and this version knows format {VERSION} only")
    raise FormatError("its files are none of KVStow's, or their header is damaged")


class Record(NamedTuple):
    """What a place holds. `checksum`: the checksum of the block's bytes on all ranks in order, without padding.
    `namespace`: see `namespace_number`."""

    digest: bytes = bytes(16)
    checksum: int = 0
    key_start: int = 0
    namespace: int = 0
    generation: int = 0
    epoch: int = 0
    written_at: int = 0
    state: int = EMPTY

    def pack(self, chunk: int, index: int) -> bytes:
        data = _ONE_RECORD.pack(*self, 0)
        own = _own_checksums(np.frombuffer(data, RECORD), chunk, index)
        return data[:-8] + bytes(own.tobytes())

    @classmethod
    def read(cls, data: bytes, chunk: int, index: int) -> Record | None:
        """Return the record, or None if these are not the bytes of a record of this place."""
        *fields, own = _ONE_RECORD.unpack(data)
        return cls(*fields) if own == _own_checksums(np.frombuffer(data, RECORD), chunk, index)[0] else None


def valid_records(data: bytes, chunk: int, generation: int) -> tuple[Any, Any]:
    """Return all records of a chunk as an array, and which of them are valid records of this generation."""
    records = np.frombuffer(data, RECORD)
    is_valid = records["own"] == _own_checksums(records, chunk, 0)
    return records, is_valid & (records["generation"] == generation)


def with_dirty(records: Any, is_dirty: Any, chunk: int, generation: int) -> bytes:
    """Return all records of a chunk, in which the chosen ones are dirty now."""
    changed = records.copy()
    changed[is_dirty] = np.zeros(1, RECORD)
    changed["state"][is_dirty], changed["generation"][is_dirty] = DIRTY, generation
    changed["own"][is_dirty] = _own_checksums(changed, chunk, 0)[is_dirty]
    return bytes(changed.tobytes())


def _own_checksums(records: Any, chunk: int, first: int) -> Any:
    """Return the checksums of records of neighbouring places, from place `first` on. They reveal records that were
    written in part or for another place. The block's bytes have a checksum of their own."""
    words = records.view("<u8").reshape(-1, RECORD_BYTES // 8)
    places = np.arange(first, first + len(words), dtype=np.uint64)
    mixed = (np.uint64(chunk + 1) << np.uint64(32)) + places
    for at in range(_WORDS):
        mixed = (mixed ^ words[:, at]) * np.uint64(_MULTIPLIER)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@lru_cache(maxsize=1024)
def namespace_number(fingerprint: str) -> int:
    """Return the number that stands for a namespace in names and records."""
    return int.from_bytes(hashlib.blake2b(fingerprint.encode(), digest_size=8).digest(), "little")


def name_digests(namespace: int, keys: Iterable[bytes]) -> list[bytes]:
    """Return the digests of blocks' names, 16 bytes each."""
    digest_of_key = xxhash.xxh3_128_digest
    return [digest_of_key(key, namespace) for key in keys]


def padded(size: int, alignment: int) -> int:
    """Return how many bytes `size` bytes take in the file."""
    return -(-size // alignment) * alignment
