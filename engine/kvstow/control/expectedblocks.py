"""Blocks without a slot that are expected to be stored soon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")

_SHARDS = 64


class ExpectedBlocks(Generic[_T]):
    """What each key belongs to. Not locked. Spread over 64 dicts, so that none is large enough to keep other threads
    waiting when it grows."""

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
        """`find`, and nothing is expected of these keys any more."""
        shards = self._shards
        found = [shards[hash(key) % _SHARDS].pop(key, None) for key in keys]
        self._count -= len(found) - found.count(None)
        return found

    def put(self, keys: Sequence[bytes], owner: _T) -> None:
        """These keys belong to `owner` from now on."""
        shards = self._shards
        for key in keys:
            shard = shards[hash(key) % _SHARDS]
            self._count += key not in shard
            shard[key] = owner
