"""The tier of an engine in this process, whose store is a `ControlledStore`."""

from __future__ import annotations

from collections.abc import Callable

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow_api.tiercontrol import TierClient, TierMeasurements
from kvstow_service.tiers.tierhost import TierChoice, TierHost


class TieredHost:
    """A `TierClients` with one `FleetTier`, on a fake clock. The test says what its clients count."""

    def __init__(self, engine: OffloadEngine, clock: FakeClock, *, pool: str = "host") -> None:
        self.engine, self.clock, self.pool = engine, clock, pool
        self.control = TierHost(self, clock=clock, allows_memory=True)
        self.measurements = TierMeasurements()
        self.control.measure = lambda: self.measurements  # type: ignore[method-assign]
        self.store = ControlledStore()
        self.stats = ClientStats(put_objects=4, put_bytes=4096)
        self.health = ClientHealth("connected")
        self.tier: FleetTier | None = None
        self.on_close: Callable[[], None] = lambda: None

    def begin(self, url: str = "memory:") -> FleetTier:
        """The store is there from the start on. `url`: what the API shows."""
        choice = TierChoice(url, self.store, "through")
        self.open(choice)
        self.control.begin(choice)
        assert self.tier is not None
        return self.tier

    def open(self, choice: TierChoice) -> None:
        settings = TierSettings(write=choice.write)
        lookups = self.store.open_lookups()
        self.tier = FleetTier(self.engine, lookups, settings, "f", name=choice.store.name, clock=self.clock)
        self.control.add(
            self.tier,
            pool=self.pool,
            namespace="a1",
            model="org/model",
            clients=lambda: [TierClient("transfers of rank 0", self.health, self.stats)],
            fingerprint_of=lambda weights: f"print-of-{weights}",
        )

    def close(self) -> None:
        self.on_close()
        if self.tier is not None:
            self.control.remove(self.tier)
            self.tier.close()
            self.tier = None

    def fill(self, fingerprint: str, count: int) -> None:
        """Put so many objects into the store."""
        for number in range(count):
            self.store.put(str(ObjectName(fingerprint, number.to_bytes(4, "big"), 0, 1)), b"x")
