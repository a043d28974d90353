"""Hits: the host blocks that a request can go on with, found and held."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.tierwaits import TierWaits


class Later(Enum):
    """The answer to a lookup is not there yet: ask again in the next step."""

    LATER = "later"


LATER = Later.LATER


class Presence(Protocol):
    """Which keys the pool has."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are present, from the first on."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]: ...


class HitFinder(Protocol):
    """Finds and holds what `Loads` asks for. Used by the scheduler's thread."""

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """The request has arrived, and will soon be looked up, up to the token `end` at most."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        """The longest hit that begins at the token `local` and ends at `end` at most; it is held."""

    def is_valid(self, hit: Hit) -> bool:
        """Whether it is still held, as far as that is known."""

    def forget(self, tracked: TrackedRequest) -> None:
        """No answer for this request is needed any more."""


class EmbeddedHits:
    """Finds hits in the engine of this process. `tier`: None without a fleet tier, which serves plain models alone."""

    def __init__(self, engine: OffloadEngine, groups: KVGroups) -> None:
        self._engine, self._groups = engine, groups
        self.tier: TierWaits | None = None

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """A lookup takes microseconds."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        if self._groups.is_plain:
            return self._hold_run(tracked, self._groups.full[0], local, end)
        end = longest_end(self._engine, self._groups, tracked, local, end)
        if end <= local:
            return None
        keys = tracked.keys_of_places(self._groups, local, end)
        lease = self._engine.lease(keys) if keys else None  # None: a block went away meanwhile
        return None if lease is None else Hit(local, end, lease)

    def is_valid(self, hit: Hit) -> bool:
        return True

    def forget(self, tracked: TrackedRequest) -> None:
        if self.tier is not None:
            self.tier.forget(tracked)

    def _hold_run(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> Hit | Later | None:
        """Find and hold in one step, where only the leading run counts."""
        if self.tier is not None and self.tier.is_waiting(tracked):
            return LATER  # before the keys are copied
        keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
        if self.tier is None:
            lease = self._engine.acquire(keys, count=False)
        elif (found := self.tier.acquire(tracked, keys)) is None:
            return LATER
        else:
            lease = found
        return Hit(local, local + len(lease.slots) * group.block_tokens, lease) if lease.slots else None


def longest_end(presence: Presence, groups: KVGroups, tracked: TrackedRequest, local: int, end: int) -> int:
    """The last aligned token up to `end` at which each group finds all that it needs beyond the first `local` tokens;
    `local` or less if there is none."""
    for group in groups.full:
        keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
        end = min(end, local + presence.lookup(keys) * group.block_tokens)
    end = end // groups.alignment * groups.alignment
    partial = [(group, _absent(presence, tracked, group, local, end)) for group in groups.partial]
    while end > local and not all(_is_whole(group, absent, local, end) for group, absent in partial):
        end -= groups.alignment
    return end


def _absent(presence: Presence, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> list[int]:
    """Blocks missing between the local prefix and each block: `[j]` counts the first `j`."""
    keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
    return list(accumulate((not there for there in presence.contains(keys)), initial=0))


def _is_whole(group: KVGroup, absent: list[int], local: int, end: int) -> bool:
    """Whether the group finds all that the token after `end` reads, in `absent` of `_absent`."""
    base = local // group.block_tokens
    first, last = max(group.first_block(end) - base, 0), end // group.block_tokens - base
    return last < len(absent) and absent[first] == absent[last]
