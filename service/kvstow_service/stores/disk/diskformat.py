"""What is in the two files of a path, byte by byte.

`data` is an array of chunks, and holds only blocks. `records` says which blocks these are:

    header, twice      4 KiB each; the valid copy with the higher number counts
    namespaces         MOST_NAMESPACES entries of 256 bytes
    chunks             MOST_CHUNKS entries of 64 bytes
    for each chunk     a record of 64 bytes and a time of last use of 4 bytes for as many places as a chunk may have

The file has holes where no chunk has places. Everything that was written only in part, or never, has a wrong checksum
and counts as absent. The record of a place also counts as absent if its generation is not that of the chunk.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

MAGIC: Final = b"KVSTOWDK"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
MOST_NAMESPACES: Final = 4096
MOST_CHUNKS: Final = 65_536
MIN_ALIGNMENT: Final = 4096
CHUNK_BYTES: Final = 1 << 30
RECORD_BYTES: Final = 64
USE_BYTES: Final = 4

_NAMESPACE_BYTES = 256
_CHUNK_ENTRY_BYTES = 64
NAMESPACES_AT: Final = 2 * HEADER_BYTES
CHUNKS_AT: Final = NAMESPACES_AT + MOST_NAMESPACES * _NAMESPACE_BYTES
RECORDS_AT: Final = CHUNKS_AT + MOST_CHUNKS * _CHUNK_ENTRY_BYTES

EMPTY, DIRTY, WRITTEN = 0, 1, 2
"""States of a record. The place of a dirty one may hold bytes of a block that was removed."""

RECORD: Final = np.dtype(
    [
        ("digest", "V16"),
        ("checksum", "<u8"),
        ("key_start", "<u8"),
        ("namespace", "<u4"),
        ("generation", "<u4"),
        ("epoch", "<u4"),
        ("written_at", "<u4"),
        ("state", "<u4"),
        ("unused", "<u4"),
        ("own", "<u8"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES
_WORDS = RECORD_BYTES // 8 - 1
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15


class FormatError(Exception):
    """The files were not written by this version. They are left as they are."""


class Header(NamedTuple):
    """`sequence`: grows with each change of the header. `epoch`: grows when records may have been lost, by a power cut.
    `is_clean`: whether everything that was written is synced. `boot`: the machine's boot in which it was written."""

    sequence: int
    num_chunks: int
    chunk_bytes: int
    alignment: int
    epoch: int
    is_clean: bool
    boot: bytes

    def pack(self) -> bytes:
        body = _HEADER_BODY.pack(
            MAGIC,
            VERSION,
            self.num_chunks,
            self.sequence,
            self.chunk_bytes,
            self.alignment,
            self.epoch,
            self.is_clean,
            self.boot,
        )
        return (body + struct.pack("<Q", checksum_of(body, 0))).ljust(HEADER_BYTES, b"\0")

    @property
    def at(self) -> int:
        """The offset at which this copy is written."""
        return self.sequence % 2 * HEADER_BYTES

    @property
    def most_places(self) -> int:
        """How many places a chunk may have."""
        return self.chunk_bytes // self.alignment

    def records_at(self, chunk: int) -> int:
        return RECORDS_AT + chunk * self._area_bytes

    def uses_at(self, chunk: int) -> int:
        return self.records_at(chunk) + self.most_places * RECORD_BYTES

    @property
    def records_end(self) -> int:
        return self.records_at(self.num_chunks)

    @property
    def _area_bytes(self) -> int:
        return _round_up(self.most_places * (RECORD_BYTES + USE_BYTES), HEADER_BYTES)


_HEADER_BODY = struct.Struct("<8sIIQQQII16s")


def read_header(data: bytes) -> Header:
    """Return the newest valid copy. `data`: both copies. Raises `FormatError` if there is none."""
    found: list[Header] = []
    versions = set[int]()
    for at in (0, HEADER_BYTES):
        body = data[at : at + _HEADER_BODY.size]
        if len(body) < _HEADER_BODY.size or body[:8] != MAGIC:
            continue
        (own,) = struct.unpack_from("<Q", data, at + _HEADER_BODY.size)
        _, version, num_chunks, sequence, chunk_bytes, alignment, epoch, clean, boot = _HEADER_BODY.unpack(body)
        versions.add(version)
        if own == checksum_of(body, 0) and version == VERSION:
            found.append(Header(sequence, num_chunks, chunk_bytes, alignment, epoch, bool(clean), boot))
    if not found:
        if versions and VERSION not in versions:
            raise FormatError(f"its files have format {min(versions)}, and this version knows format {VERSION} only")
        raise FormatError("its files are none of KVStow's, or their header is damaged")
    header = max(found)
    if not (
        0 < header.num_chunks <= MOST_CHUNKS
        and header.alignment >= MIN_ALIGNMENT
        and header.chunk_bytes >= header.alignment
        and not header.chunk_bytes % header.alignment
    ):
        raise FormatError("the header of its files makes no sense")
    return header


class NamespaceEntry(NamedTuple):
    """`number` is never used again; 0 stands for no namespace. `fingerprint` and `identity` are digests, of 16 bytes,
    of the texts that name the namespace and the layout of its pool."""

    number: int
    fingerprint: bytes
    identity: bytes
    owner: str
    label: str

    def pack(self) -> bytes:
        body = _NAMESPACE_BODY.pack(
            self.number, self.fingerprint, self.identity, _cut(self.owner, 40), _cut(self.label, 168)
        )
        return body + struct.pack("<Q", checksum_of(body, 1))


_NAMESPACE_BODY = struct.Struct("<Q16s16s40s168s")
assert _NAMESPACE_BODY.size + 8 == _NAMESPACE_BYTES


def namespace_at(row: int) -> int:
    return NAMESPACES_AT + row * _NAMESPACE_BYTES


def read_namespaces(data: bytes) -> dict[int, NamespaceEntry]:
    """Return the valid entries, by row of the table."""
    found: dict[int, NamespaceEntry] = {}
    for row in range(len(data) // _NAMESPACE_BYTES):
        body = data[row * _NAMESPACE_BYTES : row * _NAMESPACE_BYTES + _NAMESPACE_BODY.size]
        (own,) = struct.unpack_from("<Q", data, row * _NAMESPACE_BYTES + _NAMESPACE_BODY.size)
        if not own or own != checksum_of(body, 1):
            continue
        number, fingerprint, identity, owner, label = _NAMESPACE_BODY.unpack(body)
        texts = [text.rstrip(b"\0").decode("utf-8", "replace") for text in (owner, label)]
        if number:
            found[row] = NamespaceEntry(number, fingerprint, identity, *texts)
    return found


class ChunkEntry(NamedTuple):
    """The kind and generation of a chunk's places. `place_bytes` is 0 while the chunk is between two kinds."""

    place_bytes: int
    generation: int
    owner: str

    def pack(self, chunk: int) -> bytes:
        body = _CHUNK_BODY.pack(self.place_bytes, self.generation, _cut(self.owner, 40))
        return body + struct.pack("<Q", checksum_of(body, 2 + chunk))


_CHUNK_BODY = struct.Struct("<QQ40s")
assert _CHUNK_BODY.size + 8 == _CHUNK_ENTRY_BYTES


def chunk_at(chunk: int) -> int:
    return CHUNKS_AT + chunk * _CHUNK_ENTRY_BYTES


def read_chunks(data: bytes) -> dict[int, ChunkEntry]:
    found: dict[int, ChunkEntry] = {}
    for chunk in range(len(data) // _CHUNK_ENTRY_BYTES):
        body = data[chunk * _CHUNK_ENTRY_BYTES : chunk * _CHUNK_ENTRY_BYTES + _CHUNK_BODY.size]
        (own,) = struct.unpack_from("<Q", data, chunk * _CHUNK_ENTRY_BYTES + _CHUNK_BODY.size)
        if own and own == checksum_of(body, 2 + chunk):
            place_bytes, generation, owner = _CHUNK_BODY.unpack(body)
            found[chunk] = ChunkEntry(place_bytes, generation, owner.rstrip(b"\0").decode("utf-8", "replace"))
    return found


class Record(NamedTuple):
    """What a place holds. `checksum`: the checksum of the block's bytes on all ranks in order, without padding."""

    state: int
    generation: int
    digest: bytes = bytes(16)
    checksum: int = 0
    key_start: int = 0
    namespace: int = 0
    epoch: int = 0
    written_at: int = 0

    def pack(self, chunk: int, index: int) -> bytes:
        one = np.zeros(1, RECORD)
        one["digest"] = np.void(self.digest)
        for name in ("checksum", "key_start", "namespace", "generation", "epoch", "written_at", "state"):
            one[name] = getattr(self, name)
        one["own"] = _own_checksums(one, chunk, index)
        return one.tobytes()

    @classmethod
    def read(cls, data: bytes, chunk: int, index: int) -> Record | None:
        """Return the record, or None if these are not the bytes of a record of this place."""
        if len(data) != RECORD_BYTES:
            return None
        one = np.frombuffer(data, RECORD)
        if one["own"][0] != _own_checksums(one, chunk, index)[0]:
            return None
        return cls(
            int(one["state"][0]),
            int(one["generation"][0]),
            one["digest"][0].tobytes(),
            *(int(one[name][0]) for name in ("checksum", "key_start", "namespace", "epoch", "written_at")),
        )


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


def name_digests(fingerprint: bytes, keys: Iterable[bytes]) -> list[bytes]:
    """Return the digests of blocks' names, 16 bytes each. `fingerprint`: the digest of their namespace's
    fingerprint."""
    digest_of_key, seed = xxhash.xxh3_128_digest, int.from_bytes(fingerprint[:8], "little")
    return [digest_of_key(key, seed) for key in keys]


def digest_of(text: str) -> bytes:
    """Return a digest of 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def checksum_of(data: bytes, salt: int) -> int:
    digest = hashlib.blake2b(data, digest_size=8, salt=salt.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def _cut(text: str, size: int) -> bytes:
    """Return the text as UTF-8, in at most `size` bytes, cut between characters."""
    return text.encode()[:size].decode("utf-8", "ignore").encode()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def padded(sizes: Sequence[int], alignment: int) -> list[int]:
    """Return how many bytes the parts of a block take in the file."""
    return [_round_up(size, alignment) for size in sizes]
