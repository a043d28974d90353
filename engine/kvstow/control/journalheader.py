"""Two copies of a JSON document in shared memory. A write replaces the older one, so one copy is always whole."""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstow.bytesize import format_size
from kvstow.errors import JournalError

VERSION = 1
COPY_BYTES = 1 << 20  # takes memory as far as it is written
HEADER_BYTES = 2 * COPY_BYTES

_MAGIC = b"KVSTOWIX"
_START = struct.Struct("<8sIIQ")  # magic, version, length of the JSON, sequence; then the JSON and the CRC-32 of both
_CRC = struct.Struct("<I")


class JournalHeader(NamedTuple):
    """`sequence` counts the writes; it tells which copy is newer."""

    sequence: int
    found: Mapping[str, Any]


class _Copy(NamedTuple):
    sequence: int
    version: int
    body: bytes


def packed_copy(sequence: int, found: Mapping[str, Any], most_bytes: int = COPY_BYTES) -> bytes:
    """A copy of the document. Raises `JournalError` if it takes more than so many bytes."""
    body = json.dumps(found, separators=(",", ":")).encode()
    start = _START.pack(_MAGIC, VERSION, len(body), sequence)
    data = start + body + _CRC.pack(zlib.crc32(start + body))
    if len(data) > most_bytes:
        raise JournalError(
            f"what there is to record takes {format_size(len(data))}; allowed: {format_size(most_bytes)}"
        )
    return data


def write_header(memory: mmap.mmap, sequence: int, found: Mapping[str, Any]) -> JournalHeader:
    """Overwrite the older copy; `sequence` is one more than that of the newer. Returns what `read_header` will. Raises
    `JournalError` if it is too long, and writes nothing."""
    data = packed_copy(sequence, found)
    at = sequence % 2 * COPY_BYTES
    memory[at : at + len(data)] = data
    return JournalHeader(sequence, json.loads(data[_START.size : -_CRC.size]))


def read_header(memory: bytes | mmap.mmap, copy_bytes: int = COPY_BYTES) -> JournalHeader:
    """The newest whole copy. Raises `JournalError`."""
    if len(memory) < 2 * copy_bytes:
        raise JournalError(f"the journal has {len(memory)} bytes and no header")
    copies = [copy for at in (0, copy_bytes) if (copy := _read_copy(memory, at, copy_bytes)) is not None]
    if not copies:
        raise JournalError("the journal has no whole header")
    newest = max(copies)
    if newest.version != VERSION:
        raise JournalError(f"the journal has version {newest.version}; this service reads version {VERSION}")
    return JournalHeader(newest.sequence, json.loads(newest.body))


def _read_copy(memory: bytes | mmap.mmap, at: int, copy_bytes: int) -> _Copy | None:
    """None unless the copy is whole. Reads no more than it needs, as that takes memory."""
    magic, version, length, sequence = _START.unpack_from(memory, at)
    end = _START.size + length
    if magic != _MAGIC or end + _CRC.size > copy_bytes:
        return None
    data = memory[at : at + end + _CRC.size]
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    return _Copy(sequence, version, data[_START.size : end])
