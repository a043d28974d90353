"""Blocks without a slot that are expected to be stored soon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar

_SHARDS = 64


class _Owner(Protocol):
    expected: int
    """How many keys belong to it."""


_T = TypeVar("_T", bound=_Owner)


class ExpectedBlocks(Generic[_T]):
    """The owner of each key. Not locked. The keys are spread over 64 dicts, so that none is large enough to keep other
    threads waiting when it grows."""

    __slots__ = ("_count", "_shards")

    def __init__(self) -> None:
        self._shards: list[dict[bytes, _T]] = [{} for _ in range(_SHARDS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> _T | None:
        return self._shards[hash(key) % _SHARDS].get(key)

    def find(self, keys: Iterable[bytes]) -> list[_T | None]:
        shards = self._shards
        return [shards[hash(key) % _SHARDS].get(key) for key in keys]

    def take(self, keys: Iterable[bytes]) -> list[_T | None]:
        """Return the owner of each key, or None, and forget these keys."""
        shards = self._shards
        found = [shards[hash(key) % _SHARDS].pop(key, None) for key in keys]
        missing = found.count(None)
        self._count -= len(found) - missing
        if found and not missing and found.count(found[0]) == len(found):  # nearly always
            found[0].expected -= len(found)  # type: ignore[union-attr]
        else:
            for owner in found:
                if owner is not None:
                    owner.expected -= 1
        return found

    def put(self, keys: Sequence[bytes], owner: _T) -> None:
        """Let these keys belong to `owner` from now on."""
        shards = self._shards
        for key in keys:
            shard = shards[hash(key) % _SHARDS]
            before = shard.get(key)
            if before is None:
                self._count += 1
            else:
                before.expected -= 1
            shard[key] = owner
            owner.expected += 1

    def owners(self) -> Iterator[_T]:
        """Yield the owner of each key. O(keys): for integrity checks."""
        return chain.from_iterable(shard.values() for shard in self._shards)
