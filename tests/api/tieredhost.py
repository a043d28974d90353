"""A host with a fleet tier, whose store is a `ControlledStore`."""

from __future__ import annotations

from dataclasses import replace

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.errors import ConflictError, NotFoundError
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierClient, TierCounters, TierStatus
from kvstow_api.directory import EmbeddedDirectory, TierLabels, TierMeasurements

URL = "redis://10.0.0.1:6379"


class ShownTiers:
    """A `HostTier` of one pool. The test says what it measures, what its clients count, and what its contexts have."""

    def __init__(self, store: str, pool: str) -> None:
        self.store, self.url, self.pool = store, URL, pool
        self.measurements = TierMeasurements()
        self.stats, self.health = ClientStats(put_objects=4, put_bytes=4096), ClientHealth("connected")
        self.contexts: dict[bytes, int] = {}
        self.shown: list[FleetTier] = []
        self._ended = TierCounters()

    def remove(self, tier: FleetTier) -> None:
        self.shown.remove(tier)
        self._ended += tier.status().counters
        tier.close()

    def tiers(self) -> list[TierStatus]:
        clients = (TierClient("transfers of rank 0", self.health, self.stats),)
        return [
            replace(
                tier.status(),
                pool=self.pool,
                namespace="a1",
                model="org/model",
                clients=() if number else clients,
            )
            for number, tier in enumerate(self.shown)
        ]

    def totals(self) -> dict[TierLabels, TierCounters]:
        counted = sum((tier.status().counters for tier in self.shown), self._ended)
        return {(self.store, self.pool, "org/model"): counted} if self.shown else {}

    def prefetch(self, pool: str, context: bytes) -> int:
        if not self.shown:
            raise ConflictError("the store is not used")
        if context not in self.contexts:
            raise NotFoundError("no request of the context is known")
        return self.contexts[context]

    def measure(self) -> TierMeasurements:
        return self.measurements


class TieredHost:
    """A host that has a store, and tiers on a fake clock."""

    def __init__(self, engine: OffloadEngine, clock: FakeClock, *, pool: str = "host") -> None:
        self.engine, self.clock = engine, clock
        self.store = ControlledStore()
        self.tiers = ShownTiers(self.store.name, pool)

    def directory(self, max_capacity_slots: int) -> EmbeddedDirectory:
        directory = EmbeddedDirectory(self.engine, max_capacity_slots)
        directory.tier = self.tiers
        return directory

    def begin(self) -> FleetTier:
        """A namespace uses the store."""
        tier = FleetTier(
            self.engine, self.store.open_lookups(), TierSettings(), "f", name=self.store.name, clock=self.clock
        )
        self.tiers.shown.append(tier)
        return tier

    def close(self) -> None:
        """No namespace uses the store any more."""
        for tier in list(self.tiers.shown):
            self.tiers.remove(tier)
