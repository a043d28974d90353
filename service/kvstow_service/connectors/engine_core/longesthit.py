"""The longest hit among blocks that are known to be present, for all KV groups of a model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Protocol

from kvstow.control.tierneeds import Needed
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups


class Presence(Protocol):
    """Which keys the pool has."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are present, counted from the first."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]: ...


class PromptKeys(Protocol):
    """The keys of one prompt."""

    def keys(self, group: KVGroup, first: int, end: int) -> list[bytes]:
        """Keys of the group's blocks `first` to `end`, as far as their hashes are known."""


class GroupNeeds:
    """`kvstow.control.tierneeds.Needs` of a request. `keys` are all keys that a hit up to `end` may consist of."""

    def __init__(self, groups: KVGroups, prompt: PromptKeys, end: int) -> None:
        self._groups = groups
        self._end = end // groups.alignment * groups.alignment
        self._keys = {group.index: prompt.keys(group, 0, self._end // group.block_tokens) for group in groups.groups}
        self.keys = list(chain.from_iterable(self._keys.values()))

    @property
    def most(self) -> int:
        return self._end // self._groups.alignment

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        end = self._end if most is None else min(self._end, most * self._groups.alignment)
        end = longest_end(_Said(has), self._groups, _Kept(self._keys), 0, end)
        if end <= 0:
            return Needed((), 0)
        keys = [self._keys[group][number] for group, number in self._groups.places(0, end)]
        return Needed(keys, end // self._groups.alignment)


class _Kept:
    """`PromptKeys` for which each group's keys are already known."""

    def __init__(self, keys: dict[int, list[bytes]]) -> None:
        self._keys = keys

    def keys(self, group: KVGroup, first: int, end: int) -> list[bytes]:
        return self._keys[group.index][first:end]


class _Said:
    """A `Presence` that is given one answer per key."""

    def __init__(self, has: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self.contains = has

    def lookup(self, keys: Sequence[bytes]) -> int:
        return next((number for number, there in enumerate(self.contains(keys)) if not there), len(keys))


def longest_end(presence: Presence, groups: KVGroups, prompt: PromptKeys, local: int, end: int) -> int:
    """The last aligned token up to `end` at which each group finds all that it needs beyond the first `local` tokens.
    Returns `local` or less if there is none."""
    for group in groups.full:
        keys = prompt.keys(group, local // group.block_tokens, end // group.block_tokens)
        end = min(end, local + presence.lookup(keys) * group.block_tokens)
    end = end // groups.alignment * groups.alignment
    partial = [(group, _absent(presence, prompt, group, local, end)) for group in groups.partial]
    while end > local and not all(_is_whole(group, absent, local, end) for group, absent in partial):
        end -= groups.alignment
    return end


def _absent(presence: Presence, prompt: PromptKeys, group: KVGroup, local: int, end: int) -> list[int]:
    """Counts of missing blocks after the local prefix: `[j]` counts them among the first `j` blocks."""
    keys = prompt.keys(group, local // group.block_tokens, end // group.block_tokens)
    return list(accumulate((not there for there in presence.contains(keys)), initial=0))


def _is_whole(group: KVGroup, absent: list[int], local: int, end: int) -> bool:
    """Whether the group finds all that the token after `end` reads. `absent` is the result of `_absent`."""
    base = local // group.block_tokens
    first, last = max(group.first_block(end) - base, 0), end // group.block_tokens - base
    return last < len(absent) and absent[first] == absent[last]
