"""Hits: host blocks that were found and are held so that a request can continue with them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.longesthit import longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine


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
    """Finds hits in the engine of this process."""

    def __init__(self, engine: OffloadEngine, groups: KVGroups) -> None:
        self._engine, self._groups = engine, groups

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """Does nothing: a lookup takes microseconds."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        if self._groups.is_plain:
            return self._hold_run(tracked, self._groups.full[0], local, end)
        return self._hold_places(tracked, local, end)

    def is_valid(self, hit: Hit) -> bool:
        return True

    def forget(self, tracked: TrackedRequest) -> None:
        """Does nothing: no answer is awaited."""

    def _hold_places(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        """Find and hold what each group needs."""
        end = longest_end(self._engine, self._groups, tracked, local, end)
        if end <= local:
            return None
        keys = tracked.keys_of_places(self._groups, local, end)
        lease = self._engine.lease(keys) if keys else None  # None: a block was evicted meanwhile
        return None if lease is None else Hit(local, end, lease)

    def _hold_run(self, tracked: TrackedRequest, group: KVGroup, local: int, end: int) -> Hit | None:
        """Find and hold in one step. Used if only the leading run counts."""
        keys = tracked.keys(group, local // group.block_tokens, end // group.block_tokens)
        lease = self._engine.acquire(keys, count=False)
        return Hit(local, local + len(lease.slots) * group.block_tokens, lease) if lease.slots else None
