"""What the worker of a rank and the node service say to each other about memory.

A rank's memory is a list of extents. An extent is a sealed memfd that holds the slots from `first_slot` on, back to
back at the pool's slot stride. The service publishes how far each extent is populated. The worker maps no further, and
reports how many slots it has registered. It starts no copy in a revoked extent, and reports when it has nothing of the
extent mapped any more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from kvstow.attach.kinds import Kind
from kvstow.attach.payloads import PayloadReader, pack_rows, pack_text, pack_u64s
from kvstow.errors import InvalidRequestError, ProtocolError
from kvstow.messages import DesiredState, RankReport


class ExtentGrant(NamedTuple):
    """A piece of a rank's memory. `number` is its position among the rank's extents, the same on all ranks of a
    pool."""

    extent_id: int
    number: int
    first_slot: int
    num_slots: int
    num_bytes: int
    populated_bytes: int


class ExtentBytes(NamedTuple):
    """The first `num_bytes` of an extent."""

    extent_id: int
    num_bytes: int


class ExtentSlots(NamedTuple):
    extent_id: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class GrantedExtents:
    """Extents that the rank may map from now on. The frame has one descriptor per extent, in the same order.

    With `is_all`, the worker now has everything that there is for it. What it still has mapped from an earlier session
    and was not granted in this one is of no use, and it lets go of it. The service says so in each session, also if it
    has no extents for the worker.
    """

    KIND: ClassVar[Kind] = Kind.EXTENTS
    slot_stride: int
    extents: tuple[ExtentGrant, ...]
    is_all: bool

    def pack(self) -> bytes:
        return _GRANTS.pack(self.slot_stride, self.is_all) + pack_rows(_EXTENT, self.extents)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "extents")
        stride, is_all = reader.fields(_GRANTS)
        extents = tuple(map(ExtentGrant._make, reader.rows(_EXTENT)))
        reader.end()
        for extent in extents:
            if extent.num_slots * stride > extent.num_bytes or extent.populated_bytes > extent.num_bytes:
                raise reader.error(f"extent {extent.extent_id} is too short for what it says")
        return cls(stride, extents, is_all)


@dataclass(frozen=True, slots=True)
class RegisteredExtents:
    """How many slots of each extent, counted from its first slot, the worker can copy to and from."""

    KIND: ClassVar[Kind] = Kind.REGISTERED
    extents: tuple[ExtentSlots, ...]

    def pack(self) -> bytes:
        return pack_rows(_SLOTS, self.extents)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "registered extents")
        extents = tuple(map(ExtentSlots._make, reader.rows(_SLOTS)))
        reader.end()
        return cls(extents)


@dataclass(frozen=True, slots=True)
class PopulatedExtents:
    """How many bytes of each extent, counted from its start, are populated. The numbers only grow."""

    KIND: ClassVar[Kind] = Kind.POPULATED
    extents: tuple[ExtentBytes, ...]

    def pack(self) -> bytes:
        return pack_rows(_BYTES, self.extents)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "populated extents")
        extents = tuple(map(ExtentBytes._make, reader.rows(_BYTES)))
        reader.end()
        return cls(extents)


@dataclass(frozen=True, slots=True)
class _ExtentIds:
    """A list of extents."""

    KIND: ClassVar[Kind]
    extent_ids: tuple[int, ...]

    def pack(self) -> bytes:
        return pack_u64s(self.extent_ids)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, cls.__name__)
        extent_ids = reader.u64s()
        reader.end()
        return cls(extent_ids)


class RevokedExtents(_ExtentIds):
    """Extents to unregister and unmap as soon as no copy uses them. Answered with `ReleasedExtents`."""

    KIND = Kind.REVOKED


class ReleasedExtents(_ExtentIds):
    """Extents that this process no longer has mapped, registered or open."""

    KIND = Kind.LET_GO


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's report. The answer is its desired state."""

    KIND: ClassVar[Kind] = Kind.REPORT
    report: RankReport

    def pack(self) -> bytes:
        return json.dumps(self.report.to_json(), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        return cls(_message(RankReport.from_json, payload, "report"))


@dataclass(frozen=True, slots=True)
class Desired:
    """A rank's desired state: the answer to its report. Also sent unasked when it changes."""

    KIND: ClassVar[Kind] = Kind.DESIRED
    desired: DesiredState

    def pack(self) -> bytes:
        return json.dumps(self.desired.to_json(), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        return cls(_message(DesiredState.from_json, payload, "desired state"))


@dataclass(frozen=True, slots=True)
class Detach:
    """This process leaves. It has nothing of the pool mapped, and no copy under way. No answer."""

    KIND: ClassVar[Kind] = Kind.DETACH
    reason: str = ""

    def pack(self) -> bytes:
        return pack_text(self.reason)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "detach")
        reason = reader.text()
        reader.end()
        return cls(reason)


_GRANTS = struct.Struct("<Q?")
_EXTENT = struct.Struct("<QIIIQQ")
_BYTES = struct.Struct("<QQ")
_SLOTS = struct.Struct("<QI")

_Message = TypeVar("_Message", RankReport, DesiredState)


def _message(read: Callable[[Any], _Message], payload: bytes, what: str) -> _Message:
    try:
        return read(json.loads(payload))
    except (ValueError, RecursionError, InvalidRequestError) as error:
        raise ProtocolError("malformed", f"{what}: {error}") from error
