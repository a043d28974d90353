"""What a worker holds for the service after the one that it is attached to, and the messages about that.

A service that is killed together with its keeper leaves nothing but what engines have: extents, and these descriptors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from kvstow.attach.channel import close_fds
from kvstow.attach.frames import MAX_FDS
from kvstow.attach.kinds import Kind
from kvstow.attach.payloads import PayloadReader, pack_text, pack_u32s
from kvstow.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class _Names:
    """A list of descriptors by name."""

    KIND: ClassVar[Kind]
    names: tuple[str, ...]

    def pack(self) -> bytes:
        return _pack_names(self.names)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, cls.__name__)
        names = _read_names(reader)
        reader.end()
        return cls(names)


@dataclass(frozen=True, slots=True)
class DepositedDescriptors:
    """Hold these for the next service, in place of what the names stood for; `replaces`: in place of all that was held.
    The frame has a descriptor for each name, in the same order."""

    KIND: ClassVar[Kind] = Kind.DEPOSIT
    names: tuple[str, ...]
    replaces: bool

    def pack(self) -> bytes:
        return pack_u32s([int(self.replaces)]) + _pack_names(self.names)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        reader = PayloadReader(payload, "deposited descriptors")
        flags, names = reader.u32s(), _read_names(reader)
        reader.end()
        return cls(names, any(flags))


class DroppedDescriptors(_Names):
    """Hold these no longer."""

    KIND = Kind.DROP


class ReturnedDescriptors(_Names):
    """What a service before this one has deposited, before the extents that the worker has of it. The frame has a
    descriptor for each name, in the same order."""

    KIND = Kind.RETURN


class Deposits:
    """The descriptors that one worker holds, at most `MAX_FDS`. One thread uses it."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """Descriptors by name. They stay this object's."""
        return self._held

    def put(self, names: Iterable[str], fds: Iterable[int], *, replaces: bool) -> None:
        """Takes over the descriptors. What is too much is closed."""
        if replaces:
            self.close()
        for name, fd in zip(names, fds, strict=True):
            self.drop([name])
            if len(self._held) < MAX_FDS:
                self._held[name] = fd
            else:
                close_fds([fd])

    def drop(self, names: Iterable[str]) -> None:
        close_fds([self._held.pop(name) for name in names if name in self._held])

    def close(self) -> None:
        """Idempotent."""
        self.drop(list(self._held))


def _pack_names(names: tuple[str, ...]) -> bytes:
    return pack_u32s([len(names)]) + b"".join(map(pack_text, names))


def _read_names(reader: PayloadReader) -> tuple[str, ...]:
    (count, *others) = reader.u32s() or (0,)
    if others or count > MAX_FDS:
        raise ProtocolError("malformed", f"{count} descriptors by name; allowed: {MAX_FDS}")
    return tuple(reader.text() for _ in range(count))
