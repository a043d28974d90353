"""The removal of all objects of a fingerprint from a store."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstow.errors import TierUnavailableError
from kvstow.tier.store import TierStore

_CONNECT_SECONDS = 30.0
_PURGE_SECONDS = 600.0
"""A store may have to look at every object that it has."""


class TierPurge:
    """A `kvstow_api.operations.Sweeping`, with a client of its own: a purge that hangs holds up no look-up. One thread
    uses it, and closes the client with `cancel` or the last step. It can be cancelled until the store has begun."""

    total = evicted_slots = evicted_bytes = 0

    def __init__(
        self,
        store: TierStore,
        fingerprint: str,
        on_purged: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_purged` is called when the store has answered, or has not: some objects may be gone then, too."""
        self._client = store.open_lookups()
        self._fingerprint, self._on_purged, self._clock = fingerprint, on_purged, clock
        self._connect_by = clock() + _CONNECT_SECONDS
        self.waiting = True
        """For the connection to the store."""
        self.done = 0
        """Objects that were removed."""

    def step(self) -> bool:
        """Wait for the connection a moment, or purge; whether there is more to do. Raises `TierUnavailableError`."""
        health = self._client.health()
        if health.state == "connecting" and self._clock() < self._connect_by:
            return True
        self.waiting = False
        try:
            if health.state != "connected":
                raise TierUnavailableError(f"there is no connection to the store: {health.reason}")
            self.done = self._client.purge(self._fingerprint, _PURGE_SECONDS)
        finally:
            self._client.close()
            self._on_purged()
        return False

    def cancel(self) -> None:
        """Idempotent."""
        self._client.close()
