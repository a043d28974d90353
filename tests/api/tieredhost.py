"""A host with a store below its pools, of which everything that is shown is what the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConflictError, NotFoundError
from kvstow.tier.blockstore import PartCounters, StorePart
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_api.directory import EmbeddedDirectory, TierLabels, TierMeasurements

URL = "mooncake://10.0.0.1:50051"
PART = StorePart(name="transfers of the node", state="on", counters=PartCounters())
STATUS = TierStatus(
    store="memory",
    pool="host",
    namespace="a1",
    model="org/model",
    fingerprint="f",
    state="on",
    reason="",
    read_seconds=None,
    prefill_tokens_per_second=None,
    decision="no request has asked for a read yet",
    writing_blocks=0,
    reading_blocks=0,
    stuck_slots=0,
    counters=TierCounters(),
)


class ShownTiers:
    """A `HostTier` of one pool. `shown`: its namespaces."""

    def __init__(self, pool: str) -> None:
        self.store, self.url, self.pool = "memory", URL, pool
        self.measurements = TierMeasurements()
        self.part = PART
        self.contexts: dict[bytes, int] = {}
        self.shown: list[TierStatus] = []
        self._ended = TierCounters()

    def remove(self, number: int) -> None:
        """A namespace is gone."""
        self._ended += self.shown.pop(number).counters

    def tiers(self) -> list[TierStatus]:
        return list(self.shown)

    def parts(self) -> list[StorePart]:
        return [self.part]

    def totals(self) -> dict[TierLabels, TierCounters]:
        counted = sum((one.counters for one in self.shown), self._ended)
        return {TierLabels(self.store, self.pool, "org/model"): counted} if self.shown else {}

    def prefetch(self, pool: str, context: bytes) -> int:
        if not self.shown:
            raise ConflictError("the store is not used")
        if context not in self.contexts:
            raise NotFoundError("no request of the context is known")
        return self.contexts[context]

    def measure(self) -> TierMeasurements:
        return self.measurements


class TieredHost:
    """A host that has a store."""

    def __init__(self, engine: OffloadEngine, clock: FakeClock, *, pool: str = "host") -> None:
        self.engine, self.clock = engine, clock
        self.tiers = ShownTiers(pool)

    def directory(self, max_capacity_slots: int) -> EmbeddedDirectory:
        directory = EmbeddedDirectory(self.engine, max_capacity_slots)
        directory.tier = self.tiers
        return directory

    def begin(self, **changes: Any) -> int:
        """A namespace uses the store. Returns its number."""
        changed = {"pool": self.tiers.pool, "counters": TierCounters(), **changes}
        self.tiers.shown.append(replace(STATUS, **changed))
        return len(self.tiers.shown) - 1

    def change(self, number: int, **changes: Any) -> None:
        self.tiers.shown[number] = replace(self.tiers.shown[number], **changes)

    def close(self) -> None:
        """No namespace uses the store any more."""
        while self.tiers.shown:
            self.tiers.remove(0)
