"""Requests that wait for blocks of their prompts from the fleet tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.control.tierneeds import Needs
from kvstow.control.tierwait import TierWait
from kvstow.results import Lease
from kvstow_service.connectors.engine_core.longesthit import GroupNeeds
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest


class _Waiting(NamedTuple):
    """`lease`: the blocks that the pool had when the wait began, so that they are still there when it ends."""

    wait: TierWait
    lease: Lease | None


class WaitingTier(Protocol):
    """The part of an `EngineTier` that is used."""

    def look_for(self, keys: Sequence[bytes], first: int, needs: Needs | None = None) -> TierWait | None: ...
    def is_over(self, wait: TierWait) -> bool: ...
    def note_used(self, keys: Sequence[bytes]) -> None: ...


class TierWaits:
    """Looks keys up in the pool, and in the tier if the pool does not have all of them. Used by the scheduler's thread.
    Never waits itself.

    Each request asks the tier once. vLLM asks for the request again in every step until it admits it.
    """

    def __init__(self, engine: OffloadEngine, tier: WaitingTier) -> None:
        self._engine, self._tier = engine, tier
        self._asked: dict[TrackedRequest, _Waiting | None] = {}
        """None for a request that has waited."""

    def is_waiting(self, tracked: TrackedRequest) -> bool:
        """Whether `acquire` would still return None. O(1)."""
        waiting = self._asked.get(tracked)
        return waiting is not None and not self._tier.is_over(waiting.wait)

    def acquire(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> Lease | None:
        """The leading keys that are present, under a lease. None: ask again in the next step."""
        if self.is_waiting(tracked):
            return None
        lease = self._engine.acquire(keys, count=False)
        first = len(lease.keys)
        ask = None if first == len(keys) else partial(self._tier.look_for, keys, first)
        return None if self._waits(tracked, lease, ask) else lease

    def must_wait(self, tracked: TrackedRequest, lease: Lease | None, needs: GroupNeeds | None) -> bool:
        """For models with several groups or a window: whether to ask again in the next step. If not, the request
        continues with the `lease` of what the pool has; None for nothing. `needs` is None if the request needs nothing
        more. Call it once the request no longer `is_waiting`."""
        ask = None if needs is None else partial(self._tier.look_for, needs.keys, 0, needs)
        return self._waits(tracked, lease, ask)

    def _waits(self, tracked: TrackedRequest, lease: Lease | None, ask: Callable[[], TierWait | None] | None) -> bool:
        """Whether the request waits from now on; the wait then holds the lease. `ask` is None if the request needs
        nothing from the tier."""
        is_first, waiting = tracked not in self._asked, self._asked.get(tracked)
        self._asked[tracked] = None
        if waiting is not None:
            self._release(waiting)
        elif is_first and ask is not None and (wait := ask()) is not None:
            self._asked[tracked] = _Waiting(wait, lease)
            return True
        if lease is not None and (is_first or waiting is not None):
            self._tier.note_used(lease.keys)
        return False

    def forget(self, tracked: TrackedRequest) -> None:
        """End the request's wait. It may ask again."""
        waiting = self._asked.pop(tracked, None)
        if waiting is not None:
            self._release(waiting)

    def _release(self, waiting: _Waiting) -> None:
        if waiting.lease is not None:
            self._engine.release_lease(waiting.lease)

    def forget_all(self) -> None:
        """End all waits."""
        for tracked in list(self._asked):
            self.forget(tracked)
