"""How an engine learns which blocks of its namespace were stored or removed. It reads the events page by page."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple, Self

from kvstow.attach.kinds import Kind
from kvstow.attach.payloads import PayloadReader, pack_keys

_KINDS: Final[tuple[Literal["stored", "removed"], ...]] = ("stored", "removed")


class BlockChange(NamedTuple):
    """Blocks that can be found from now on, or no longer. The keys have equal lengths."""

    kind: Literal["stored", "removed"]
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ReadEvents:
    """Ask what has happened after this cursor. 0 starts at the oldest event that the service keeps."""

    KIND: ClassVar[Kind] = Kind.READ_EVENTS
    after: int

    def pack(self) -> bytes:
        return _U64.pack(self.after)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "read of events")
        after = reader.u64()
        reader.end()
        return cls(after)


@dataclass(frozen=True, slots=True)
class EventPage:
    """What has happened to the blocks of the session's namespace, in order. `cursor` is the position after the last
    event that was read. `lost`: earlier events were dropped. `has_more`: another page can be read at once."""

    KIND: ClassVar[Kind] = Kind.EVENTS
    cursor: int
    changes: tuple[BlockChange, ...]
    lost: bool = False
    has_more: bool = False

    def pack(self) -> bytes:
        parts = [_HEAD.pack(self.cursor, self.lost, self.has_more, len(self.changes))]
        for change in self.changes:
            parts += (_U8.pack(_KINDS.index(change.kind)), pack_keys(change.keys))
        return b"".join(parts)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "page of events")
        cursor, lost, has_more, count = reader.fields(_HEAD)
        changes: list[BlockChange] = []
        for _ in range(count):
            (kind,) = reader.fields(_U8)
            if kind >= len(_KINDS):
                raise reader.error(f"an event has kind {kind}")
            changes.append(BlockChange(_KINDS[kind], reader.keys()))
        reader.end()
        return cls(cursor, tuple(changes), lost, has_more)


_U8, _U64, _HEAD = struct.Struct("<B"), struct.Struct("<Q"), struct.Struct("<Q??I")
