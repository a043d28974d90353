"""What an engine's host gets from the control plane, whether that is embedded or in the node service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstow.messages import Direction, Mark, Op

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Awaited(Protocol[_T_co]):
    """An answer of the control plane that may not have arrived yet."""

    @property
    def done(self) -> bool: ...

    @property
    def value(self) -> _T_co:
        """The value, once the answer is `done`."""

    @property
    def error(self) -> str | None:
        """Why there is no real answer, so that the value promises nothing; None if there is one."""


@dataclass(frozen=True, slots=True)
class Given(Generic[_T]):
    """An answer that is there at once."""

    value: _T
    error: str | None = None
    done: bool = True


class KeyRun(NamedTuple):
    """Consecutive keys of a lookup that are all present: the number of the first one, and how many there are."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Keeps the blocks that a lookup has found from eviction, until it is released or a load uses it. `num_keys`: how
    many keys were present. `slots`: their slots; empty if only the node service knows them."""

    lease_id: int
    num_keys: int = 0
    slots: tuple[int, ...] = ()


NO_LEASE = Lease(0)
"""The lease of a miss. It holds nothing."""


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """The result of planning a store. `op` is None if there is nothing to store. `accepted[i]` is the index, among the
    keys given, of the key that pair `i` of `op` stores. `outcomes` counts all other keys by reason. `unplaced` has the
    indices of keys that were refused or found no slot. The host may offer them again once there is `store_room`."""

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
    """The keys of a hit, in the order of the tokens at which their blocks end, and how many blocks of tokens the hit
    saves computing (`BreakEven`)."""

    keys: Sequence[bytes]
    blocks: int


class Needs(Protocol):
    """Decides what a hit is. If a group needs only a part of a prefix, a leading run of keys is not a hit, and only the
    host knows the groups. O(keys)."""

    @property
    def most(self) -> int:
        """`Needed.blocks` of a hit for which all keys are present."""

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        """The longest hit of one request, of at most `most` blocks. `has` says for each key whether it is present."""
