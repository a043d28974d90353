"""What an engine's host gets from the control plane, whether that is embedded or in the node service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstow.messages import Direction, Mark, Op, TierDirection

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Awaited(Protocol[_T_co]):
    """An answer of the control plane that may not be there yet."""

    @property
    def done(self) -> bool: ...

    @property
    def value(self) -> _T_co:
        """Of an answer that is `done`."""

    @property
    def error(self) -> str | None:
        """Why the value is the one that promises nothing."""


@dataclass(frozen=True, slots=True)
class Given(Generic[_T]):
    """An answer that is there at once."""

    value: _T
    error: str | None = None
    done: bool = True


class KeyRun(NamedTuple):
    """Neighbours among the keys of a lookup, all of which are present: the number of the first one, and how many."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Keys that were present, and their slots (empty where only the node service knows them). Ends when it is released,
    or when a load uses it."""

    lease_id: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """The result of planning a store. `accepted[i]` is the index, in the keys given, of pair `i` of `op`; `op` is None
    if there is nothing to store. `outcomes` counts all other keys by reason. `unplaced`: indices of keys that were
    refused or found no slot. The host may offer them again once there is `store_room`."""

    op: Op | None
    accepted: tuple[int, ...]
    outcomes: dict[str, int]
    unplaced: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TierSettled:
    """The end of a transfer to or from the fleet tier. `moved`: the leading keys that all ranks have moved; those of a
    fetch are visible now, unless they were purged meanwhile. `failed`: objects that the store could not move, on the
    rank with the most. `seconds`: what the store took, on the slowest rank."""

    op_id: int
    direction: TierDirection
    keys: tuple[bytes, ...]
    moved: int
    seconds: float
    failed: int = 0
    full: bool = False
    outage: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A final result of an op, reported to the host once. For a store, `source_free` (every rank has read its blocks)
    may come before `done` or `failed`, which imply it."""

    op_id: int
    direction: Direction
    mark: Mark
    request_id: str
    blocks: tuple[int, ...]
    error: str | None
