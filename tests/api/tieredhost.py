"""A host with a fleet tier, whose store is a `ControlledStore`."""

from __future__ import annotations

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierClient
from kvstow_api.directory import EmbeddedDirectory, TierMeasurements
from kvstow_service.tiers.hostedtiers import HostedTiers, TierChoice

URL = "redis://10.0.0.1:6379"


class TieredHost:
    """A host that has a store, and tiers on a fake clock. The test says what its clients count."""

    def __init__(self, engine: OffloadEngine, clock: FakeClock, *, pool: str = "host") -> None:
        self.engine, self.clock, self.pool = engine, clock, pool
        self.store = ControlledStore()
        self.tiers = HostedTiers(TierChoice(URL, self.store))
        self.measurements = TierMeasurements()
        self.tiers.measure = lambda: self.measurements  # type: ignore[method-assign]
        self.stats = ClientStats(put_objects=4, put_bytes=4096)
        self.health = ClientHealth("connected")
        self._open: list[FleetTier] = []

    def directory(self, max_capacity_slots: int) -> EmbeddedDirectory:
        directory = EmbeddedDirectory(self.engine, max_capacity_slots)
        directory.tier = self.tiers
        return directory

    def begin(self) -> FleetTier:
        """A namespace uses the store."""
        tier = FleetTier(
            self.engine, self.store.open_lookups(), TierSettings(), "f", name=self.store.name, clock=self.clock
        )
        self._open.append(tier)
        self.tiers.add(
            tier,
            pool=self.pool,
            namespace="a1",
            model="org/model",
            clients=lambda: [TierClient("transfers of rank 0", self.health, self.stats)],
        )
        return tier

    def close(self) -> None:
        """No namespace uses the store any more."""
        while self._open:
            tier = self._open.pop()
            self.tiers.remove(tier)
            tier.close()
