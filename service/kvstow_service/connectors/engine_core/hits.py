"""Hits: host blocks that were found and are held so that a request can continue with them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.longesthit import GroupNeeds, longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine
    from kvstow_service.connectors.engine_core.tierwaits import TierWaits


class Later(Enum):
    """The answer to a lookup has not arrived: ask again in the next step."""

    LATER = "later"


LATER = Later.LATER


class HitFinder(Protocol):
    """Finds and holds what `Loads` asks for. Used by the scheduler's thread."""

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """The request has arrived and will soon be looked up, up to the token `end` at most."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        """The longest hit that begins at the token `local` and ends at `end` at most. The hit is held."""

    def is_valid(self, hit: Hit) -> bool:
        """Whether the hit is still held, as far as that is known."""

    def forget(self, tracked: TrackedRequest) -> None:
        """The answer for this request is no longer needed."""


class EmbeddedHits:
    """Finds hits in the engine of this process. `tier` is None without a fleet tier."""

    def __init__(self, engine: OffloadEngine, groups: KVGroups) -> None:
        self._engine, self._groups = engine, groups
        self.tier: TierWaits | None = None

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """Does nothing: a lookup takes microseconds."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        if self._groups.is_plain:
            return self._hold_run(tracked, self._groups.full[0], local, end)
        if self.tier is None:
            return self._hold_places(tracked, local, end)
        if self.tier.is_waiting(tracked):
            return LATER
        hit = self._hold_places(tracked, local, end)
        is_all = hit is not None and hit.end == end // self._groups.alignment * self._groups.alignment
        needs = None if is_all else GroupNeeds(self._groups, tracked, local, end)
        return LATER if self.tier.must_wait(tracked, None if hit is None else hit.lease, needs) else hit

    def is_valid(self, hit: Hit) -> bool:
        return True

    def forget(self, tracked: TrackedRequest) -> None:
        if self.tier is not None:
            self.tier.forget(tracked)

    def _hold_places(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        """Find and hold what each group needs."""
        end = longest_end(self._engine, self._groups, tracked, local, end)
        if end <= local:
            return None
        keys = tracked.keys_of_places(self._groups, local, end)
        lease = self._engine.lease(keys) if keys else None  # None: a block was evicted meanwhile
        return None if lease is None else Hit(local, end, lease)

    def _hold_run(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> Hit | Later | None:
        """Find and hold in one step. Used if only the leading run counts."""
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
