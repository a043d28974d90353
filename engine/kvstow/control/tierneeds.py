"""Which blocks make up a hit where a model has several KV groups or windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


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


class Found(NamedTuple):
    """A hit that is longer than the pool's own. `keys`: all that are needed of it; `blocks`: how many blocks of tokens
    longer it is; `beyond`: how many of the keys the pool's own hit does not need."""

    keys: Sequence[bytes]
    blocks: int
    beyond: int

    @property
    def worth(self) -> float:
        """How many blocks of tokens one of its keys saves computing."""
        return self.blocks / len(self.keys)


NOTHING = Found((), 0, 0)
