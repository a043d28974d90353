"""Descriptors that a worker holds for the next service, and the messages about them.

When a service is killed together with its keeper, only what the engines hold survives: the extents and these
descriptors.
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
    """A list of names of descriptors."""

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
    """Hold these descriptors for the next service. Each replaces the one held under its name. With `replaces`, they
    replace all that are held. The frame has one descriptor per name, in the same order."""

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
    """Stop holding these descriptors."""

    KIND = Kind.DROP


class ReturnedDescriptors(_Names):
    """The descriptors that an earlier service deposited. The worker sends them before it hands back that service's
    extents. The frame has one descriptor per name, in the same order."""

    KIND = Kind.RETURN


class Deposits:
    """The descriptors that one worker holds, at most `MAX_FDS`. One thread uses it."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """Descriptors by name. This object still owns them."""
        return self._held

    def put(self, names: Iterable[str], fds: Iterable[int], *, replaces: bool) -> None:
        """Takes ownership of the descriptors, and closes those beyond the limit."""
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
