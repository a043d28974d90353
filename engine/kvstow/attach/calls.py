"""What the scheduler half of an engine asks of the node service, and the answers.

Slots are the pool's. Blocks are the engine's own and stay with it: pair `i` of an op is the engine's block `i`. The
blocks of its namespace that were stored or removed are events, which it reads page by page.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import ClassVar, Final, Literal, NamedTuple, Self

from kvstow.attach.payloads import Kind, PayloadReader, pack_keys, pack_rows, pack_text, pack_u32s, pack_u64s
from kvstow.messages import Completion, Direction, Mark
from kvstow.plaintext import plain
from kvstow.stats import LOAD_CHOICES

_MARKS: Final[tuple[Mark, ...]] = ("source_free", "done", "failed")
_DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "load")


class Hold(IntEnum):
    """What a lookup protects from eviction."""

    NOTHING = 0
    PRESENT = 1
    """All keys that are present."""
    LEADING = 2
    """The keys up to the first absent one. The answer holds no other run."""
    ALL = 3
    """All keys, or nothing if one of them is absent."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of `keys` are present. `counted`: it counts as a lookup of a request."""

    KIND: ClassVar[Kind] = Kind.LOOKUP
    keys: Sequence[bytes]
    hold: Hold = Hold.LEADING
    counted: bool = True

    def pack(self) -> bytes:
        return _LOOKUP.pack(self.hold, self.counted) + pack_keys(self.keys)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "lookup")
        hold, counted = reader.fields(_LOOKUP)
        if hold > Hold.ALL:
            raise reader.error(f"hold is {hold}")
        keys = reader.keys()
        reader.end()
        return cls(keys, Hold(hold), counted)


@dataclass(frozen=True, slots=True)
class LookupPrompt:
    """Which of `keys` are present. `keys` are those of all blocks of a prompt, one KV group after the other. Holds
    nothing. The service may fetch the missing keys that a hit needs from the fleet tier before it answers."""

    KIND: ClassVar[Kind] = Kind.LOOKUP_PROMPT
    keys: Sequence[bytes]

    def pack(self) -> bytes:
        return pack_keys(self.keys)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "lookup of a prompt")
        keys = reader.keys()
        reader.end()
        return cls(keys)


@dataclass(frozen=True, slots=True)
class Found:
    """Runs of present keys, as (index of the first key, length). `lease_id` is 0 if nothing is held. `fetched`:
    the runs of those keys that came while the lookup waited for the fleet tier.

    A lease holds the keys of all runs, in order. `BeginLoad.first` is an index into them.
    """

    KIND: ClassVar[Kind] = Kind.FOUND
    lease_id: int
    runs: tuple[tuple[int, int], ...]
    fetched: tuple[tuple[int, int], ...] = ()

    def pack(self) -> bytes:
        return _U64.pack(self.lease_id) + pack_rows(_PAIR, self.runs) + pack_rows(_PAIR, self.fetched)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "answer to a lookup")
        lease_id = reader.u64()
        runs, fetched = tuple(reader.rows(_PAIR)), tuple(reader.rows(_PAIR))
        reader.end()
        return cls(lease_id, runs, fetched)

    @property
    def leading(self) -> int:
        """How many keys are present, counted from the first key."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == 0 else 0


@dataclass(frozen=True, slots=True)
class Pending:
    """The answer to a lookup takes time: the fleet tier may have more blocks, or the ranks are still registering the
    memory. The answer comes later, under the same request id. Answers to other calls may come before it."""

    KIND: ClassVar[Kind] = Kind.PENDING

    def pack(self) -> bytes:
        return b""

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        PayloadReader(payload, "notice about a lookup").end()
        return cls()


@dataclass(frozen=True, slots=True)
class Prefill:
    """How many prompt tokens the model has computed, and in how many seconds. No answer."""

    KIND: ClassVar[Kind] = Kind.PREFILL
    tokens: int
    seconds: float

    def pack(self) -> bytes:
        return _PREFILL.pack(self.tokens, self.seconds)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "prefill speed")
        tokens, seconds = reader.fields(_PREFILL)
        reader.end()
        if not 0 < seconds < inf:
            raise reader.error(f"seconds are {seconds}")
        return cls(tokens, seconds)


@dataclass(frozen=True, slots=True)
class Release:
    """End leases. No answer; a lease that has ended is ignored."""

    KIND: ClassVar[Kind] = Kind.RELEASE
    lease_ids: tuple[int, ...]

    def pack(self) -> bytes:
        return pack_u64s(self.lease_ids)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "release")
        lease_ids = reader.u64s()
        reader.end()
        return cls(lease_ids)


@dataclass(frozen=True, slots=True)
class BeginLoad:
    """Load `count` slots of a lease, starting at its slot `first`. This uses up the lease. `choice`: one of
    `LOAD_CHOICES`, which is counted."""

    KIND: ClassVar[Kind] = Kind.BEGIN_LOAD
    lease_id: int
    first: int
    count: int
    request_id: str = ""
    choice: str = "async_engine"

    def pack(self) -> bytes:
        choice = LOAD_CHOICES.index(self.choice)
        return _LOAD.pack(self.lease_id, self.first, self.count, choice) + pack_text(self.request_id)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "load")
        lease_id, first, count, choice = reader.fields(_LOAD)
        request_id = reader.text()
        reader.end()
        if choice >= len(LOAD_CHOICES):
            raise reader.error(f"the choice is {choice}")
        return cls(lease_id, first, count, request_id, LOAD_CHOICES[choice])


@dataclass(frozen=True, slots=True)
class LoadBegun:
    """The op of a load, and the slots to read."""

    KIND: ClassVar[Kind] = Kind.LOAD_BEGUN
    op_id: int
    slots: tuple[int, ...]

    def pack(self) -> bytes:
        return _U64.pack(self.op_id) + pack_u32s(self.slots)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "answer to a load")
        op_id, slots = reader.u64(), reader.u32s()
        reader.end()
        return cls(op_id, slots)


@dataclass(frozen=True, slots=True)
class BeginStore:
    """Store blocks under `keys`."""

    KIND: ClassVar[Kind] = Kind.BEGIN_STORE
    keys: Sequence[bytes]
    request_id: str = ""

    def pack(self) -> bytes:
        return pack_text(self.request_id) + pack_keys(self.keys)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "store")
        request_id, keys = reader.text(), reader.keys()
        reader.end()
        return cls(keys, request_id)


@dataclass(frozen=True, slots=True)
class StoreBegun:
    """The op of a store. Block `accepted[i]`, an index into the requested keys, goes to `slots[i]`. `op_id` is 0 if
    there is nothing to store. `outcomes` and `unplaced` are those of `StoreGrant`. `room` is the number of blocks that
    the next store would find a slot for."""

    KIND: ClassVar[Kind] = Kind.STORE_BEGUN
    op_id: int
    accepted: tuple[int, ...]
    slots: tuple[int, ...]
    unplaced: tuple[int, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    room: int = 0

    def pack(self) -> bytes:
        counts = [pack_text(name) + _U32.pack(count) for name, count in self.outcomes.items()]
        return b"".join(
            (
                _TWO_U64.pack(self.op_id, self.room),
                pack_u32s(self.accepted),
                pack_u32s(self.slots),
                pack_u32s(self.unplaced),
                _U32.pack(len(counts)),
                *counts,
            )
        )

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "answer to a store")
        op_id, room = reader.fields(_TWO_U64)
        accepted, slots, unplaced = reader.u32s(), reader.u32s(), reader.u32s()
        if len(accepted) != len(slots):
            raise reader.error(f"{len(accepted)} blocks and {len(slots)} slots")
        outcomes: dict[str, int] = {}
        for _ in range(reader.u32()):
            name = reader.text()
            outcomes[name] = reader.u32()
        reader.end()
        return cls(op_id, accepted, slots, unplaced, outcomes, room)


@dataclass(frozen=True, slots=True)
class Completions:
    """What `rank` reports about its ops, in order. No answer: see `SettledOps`."""

    KIND: ClassVar[Kind] = Kind.COMPLETIONS
    rank: int
    boot_id: str
    completions: tuple[Completion, ...]

    def pack(self) -> bytes:
        parts = [_U32.pack(self.rank), pack_text(self.boot_id), _U32.pack(len(self.completions))]
        for done in self.completions:
            mark = _MARKS.index(done.mark)
            parts.append(_COMPLETION.pack(done.op_id, mark, done.num_bytes, done.seconds, done.queue_seconds))
            parts.append(_pack_error(done.error))
        return b"".join(parts)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "completions")
        rank, boot_id = reader.u32(), reader.text()
        found: list[Completion] = []
        for _ in range(reader.u32()):
            op_id, mark, num_bytes, seconds, queue_seconds = reader.fields(_COMPLETION)
            error = _take_error(reader)
            if mark >= len(_MARKS) or not (0 <= seconds < _TOO_LONG and 0 <= queue_seconds < _TOO_LONG):
                raise reader.error(f"op {op_id} has mark {mark} after {seconds} and {queue_seconds} seconds")
            found.append(Completion(op_id, _MARKS[mark], error, num_bytes, seconds, queue_seconds))
        reader.end()
        return cls(rank, boot_id, tuple(found))


@dataclass(frozen=True, slots=True)
class SettledOp:
    """A final result of an op of this session: see `kvstow.control.ops.Settled`."""

    op_id: int
    direction: Direction
    mark: Mark
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SettledOps:
    """Results that became final, in order. Sent unasked. `room` as in `StoreBegun`."""

    KIND: ClassVar[Kind] = Kind.SETTLED
    ops: tuple[SettledOp, ...]
    room: int = 0

    def pack(self) -> bytes:
        parts = [_U64.pack(self.room), _U32.pack(len(self.ops))]
        for op in self.ops:
            parts.append(_SETTLED.pack(op.op_id, _DIRECTIONS.index(op.direction), _MARKS.index(op.mark)))
            parts.append(_pack_error(op.error))
        return b"".join(parts)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "settled ops")
        room = reader.u64()
        found: list[SettledOp] = []
        for _ in range(reader.u32()):
            op_id, direction, mark = reader.fields(_SETTLED)
            if direction >= len(_DIRECTIONS) or mark >= len(_MARKS):
                raise reader.error(f"op {op_id} has direction {direction} and mark {mark}")
            found.append(SettledOp(op_id, _DIRECTIONS[direction], _MARKS[mark], _take_error(reader)))
        reader.end()
        return cls(tuple(found), room)


@dataclass(frozen=True, slots=True)
class Refresh:
    """See `OffloadEngine.refresh`. No answer."""

    KIND: ClassVar[Kind] = Kind.REFRESH
    keys: Sequence[bytes]

    def pack(self) -> bytes:
        return pack_keys(self.keys)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "refresh")
        keys = reader.keys()
        reader.end()
        return cls(keys)


@dataclass(frozen=True, slots=True)
class CountLookup:
    """Count one lookup of `queried` blocks that found `hits`. No answer."""

    KIND: ClassVar[Kind] = Kind.COUNT_LOOKUP
    queried: int
    hits: int

    def pack(self) -> bytes:
        return _PAIR.pack(self.queried, self.hits)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "count of a lookup")
        queried, hits = reader.fields(_PAIR)
        reader.end()
        if hits > queried:
            raise reader.error(f"{hits} hits of {queried} blocks")
        return cls(queried, hits)


@dataclass(frozen=True, slots=True)
class Reset:
    """Move this session to a fresh epoch. Nothing that other sessions use is removed."""

    KIND: ClassVar[Kind] = Kind.RESET

    def pack(self) -> bytes:
        return b""

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        PayloadReader(payload, "reset").end()
        return cls()


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The session's namespace after a reset."""

    KIND: ClassVar[Kind] = Kind.RESET_DONE
    namespace: str

    def pack(self) -> bytes:
        return pack_text(self.namespace)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "answer to a reset")
        namespace = reader.text()
        reader.end()
        return cls(namespace)


_U32, _U64, _PAIR, _TWO_U64 = (struct.Struct(layout) for layout in ("<I", "<Q", "<II", "<QQ"))
_LOOKUP = struct.Struct("<B?")
_PREFILL = struct.Struct("<Qd")
_LOAD = struct.Struct("<QIIB")
_COMPLETION = struct.Struct("<QBQdd")
_SETTLED = struct.Struct("<QBB")
_TOO_LONG = 1e9


def _pack_error(error: str | None) -> bytes:
    """Pack an error message; no error is packed as an empty text."""
    return pack_text(error or "")


def _take_error(reader: PayloadReader) -> str | None:
    return plain(reader.text()) or None


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


_U8, _HEAD = struct.Struct("<B"), struct.Struct("<Q??I")
