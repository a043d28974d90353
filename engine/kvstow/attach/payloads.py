"""How values lie in a payload: little endian, without gaps. Lists and texts start with their length."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvstow.errors import ProtocolError

MAX_KEY_BYTES = 256
MAX_TEXT_BYTES = 4096

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_KEYS = struct.Struct("<HI")


def pack_text(text: str) -> bytes:
    """u16 length and UTF-8. Text longer than `MAX_TEXT_BYTES` is cut."""
    data = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    return _U16.pack(len(data)) + data


def pack_u32s(values: Sequence[int]) -> bytes:
    """u32 count and u32s. Raises `ProtocolError` for a value that does not fit."""
    try:
        return struct.pack(f"<I{len(values)}I", len(values), *values)
    except struct.error as error:
        raise ProtocolError("malformed", f"a list holds a value that is no 32-bit number: {error}") from error


def pack_u64s(values: Sequence[int]) -> bytes:
    """u32 count and u64s. Raises `ProtocolError` for a value that does not fit."""
    try:
        return _U32.pack(len(values)) + struct.pack(f"<{len(values)}Q", *values)
    except struct.error as error:
        raise ProtocolError("malformed", f"a list holds a value that is no 64-bit number: {error}") from error


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """u16 width, u32 count, and the keys joined. All keys of one engine have the same length. Raises `ProtocolError` if
    the total length, the first key or the last key contradicts that. Comparing all of 1,000 keys would take four times
    as long as the rest."""
    width = len(keys[0]) if keys else 0
    joined = b"".join(keys)
    if width * len(keys) != len(joined) or (keys and len(keys[-1]) != width):
        raise ProtocolError("malformed", "the keys of one message have different lengths")
    if keys and not 0 < width <= MAX_KEY_BYTES:
        raise ProtocolError("malformed", f"a key has {width} bytes; allowed: 1 to {MAX_KEY_BYTES}")
    return _KEYS.pack(width, len(keys)) + joined


def pack_rows(layout: struct.Struct, rows: Iterable[Sequence[Any]]) -> bytes:
    """u32 count and rows of one layout."""
    packed = [layout.pack(*row) for row in rows]
    return _U32.pack(len(packed)) + b"".join(packed)


@lru_cache(maxsize=8)
def _key_type(width: int) -> np.dtype[np.void]:
    return np.dtype(f"V{width}")  # S would strip zero bytes from the end


class PayloadReader:
    """Takes values from a payload, in order. Every method raises `ProtocolError` if the payload is too short or a value
    is impossible, before it allocates anything."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        """`what`: the name of the message, for errors."""
        self._data = data
        self._at = 0
        self._what = what

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._data, self._advance(layout.size))

    def u32(self) -> int:
        value: int = self.fields(_U32)[0]
        return value

    def u64(self) -> int:
        value: int = self.fields(_U64)[0]
        return value

    def text(self) -> str:
        (length,) = self.fields(_U16)
        if length > MAX_TEXT_BYTES:
            raise self.error(f"a text of {length} bytes; allowed: {MAX_TEXT_BYTES}")
        begin = self._advance(length)
        return self._data[begin : begin + length].decode("utf-8", "replace")

    def u32s(self) -> tuple[int, ...]:
        count = self.u32()
        return struct.unpack_from(f"<{count}I", self._data, self._advance(4 * count))

    def u64s(self) -> tuple[int, ...]:
        count = self.u32()
        return struct.unpack_from(f"<{count}Q", self._data, self._advance(8 * count))

    def keys(self) -> list[bytes]:
        width, count = self.fields(_KEYS)
        if not count:
            return []
        if not 0 < width <= MAX_KEY_BYTES:
            raise self.error(f"keys of {width} bytes; allowed: 1 to {MAX_KEY_BYTES}")
        begin = self._advance(width * count)
        keys: list[bytes] = np.frombuffer(self._data, _key_type(width), count, begin).tolist()
        return keys

    def rows(self, layout: struct.Struct) -> Iterator[tuple[Any, ...]]:
        count = self.u32()
        begin = self._advance(layout.size * count)
        return layout.iter_unpack(memoryview(self._data)[begin : begin + layout.size * count])

    def end(self) -> None:
        """Raises `ProtocolError` if the payload does not end here."""
        if self._at != len(self._data):
            raise self.error(f"{len(self._data) - self._at} bytes too many")

    def error(self, problem: str) -> ProtocolError:
        return ProtocolError("malformed", f"{self._what}: {problem}")

    def _advance(self, size: int) -> int:
        begin = self._at
        if begin + size > len(self._data):
            raise self.error(f"{begin + size - len(self._data)} bytes too few")
        self._at = begin + size
        return begin
