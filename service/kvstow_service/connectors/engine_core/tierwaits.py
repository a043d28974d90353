"""Requests that wait for what the fleet tier has of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import TierWait
from kvstow.results import Lease
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest


class _Waiting(NamedTuple):
    """`lease`: what the pool had when the wait began, so that it is still there when the wait is over."""

    wait: TierWait
    lease: Lease


class WaitingTier(Protocol):
    """What is used of an `EngineTier`."""

    def look_for(self, keys: Sequence[bytes], first: int) -> TierWait | None: ...
    def is_over(self, wait: TierWait) -> bool: ...
    def note_used(self, keys: Sequence[bytes]) -> None: ...


class TierWaits:
    """Looks keys up in the pool, and in the tier if the pool has not all of them. Used by the scheduler's thread; it
    never waits.

    Each request asks the tier once: it is asked for again in every step until it is admitted.
    """

    def __init__(self, engine: OffloadEngine, tier: WaitingTier) -> None:
        self._engine, self._tier = engine, tier
        self._asked: dict[TrackedRequest, _Waiting | None] = {}
        """None: it has waited."""

    def is_waiting(self, tracked: TrackedRequest) -> bool:
        """Whether `acquire` would return None once more. O(1)."""
        waiting = self._asked.get(tracked)
        return waiting is not None and not self._tier.is_over(waiting.wait)

    def acquire(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> Lease | None:
        """The leading keys that are present, leased. None: ask again in the next step."""
        is_first, waiting = tracked not in self._asked, self._asked.get(tracked)
        if waiting is not None and not self._tier.is_over(waiting.wait):
            return None
        lease = self._engine.acquire(keys, count=False)
        self._asked[tracked] = None
        if waiting is not None:
            self._engine.release_lease(waiting.lease)
        elif (
            is_first
            and len(lease.keys) < len(keys)
            and (wait := self._tier.look_for(keys, len(lease.keys))) is not None
        ):
            self._asked[tracked] = _Waiting(wait, lease)
            return None
        if is_first or waiting is not None:
            self._tier.note_used(lease.keys)
        return lease

    def forget(self, tracked: TrackedRequest) -> None:
        """The request waits no longer, and may ask again."""
        waiting = self._asked.pop(tracked, None)
        if waiting is not None:
            self._engine.release_lease(waiting.lease)

    def forget_all(self) -> None:
        """Nobody waits any longer."""
        for tracked in list(self._asked):
            self.forget(tracked)
