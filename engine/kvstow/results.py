"""What an engine's host gets from the control plane, whether that is embedded or in the node service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstow.messages import Direction, Mark, Op

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
    """How many keys were present, and their slots (empty where only the node service knows them). Ends when it is
    released, or when a load uses it."""

    lease_id: int
    num_keys: int = 0
    slots: tuple[int, ...] = ()


NO_LEASE = Lease(0)
"""That of a miss; it holds nothing."""


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
class Settled:
    """A final result of an op, reported to the host once. For a store, `source_free` (every rank has read its blocks)
    may come before `done` or `failed`, which imply it."""

    op_id: int
    direction: Direction
    mark: Mark
    request_id: str
    blocks: tuple[int, ...]
    error: str | None


class Needed(NamedTuple):
    """The keys of a hit, in the order of the tokens at which their blocks end, and how many blocks of tokens
    (`BreakEven`) it saves computing."""

    keys: Sequence[bytes]
    blocks: int


class Needs(Protocol):
    """Where some group needs only a part of a prefix, a leading run of keys is not a hit. The host knows the groups and
    decides what one is. O(keys)."""

    @property
    def most(self) -> int:
        """`Needed.blocks`, if all keys were there."""

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        """The longest hit of one request, of at most so many blocks; `has` says for each key whether it is present."""
