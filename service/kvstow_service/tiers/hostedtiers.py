"""The fleet tier of a host, as its operators see it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstow.control.fleettier import FleetTier
from kvstow.tier.store import TierStore
from kvstow.tier.tierstatus import TierClient, TierCounters, TierStatus
from kvstow_api.directory import TierLabels, TierMeasurements
from kvstow_service.tiers.storeaddress import measure_store, shown_url
from kvstow_service.tiers.stores import open_store


class TierChoice(NamedTuple):
    """A store. `url` is as it was given: it may name files."""

    url: str
    store: TierStore

    @classmethod
    def of(cls, url: str) -> TierChoice:
        """Opens no connection. Raises `ConfigError`, or `MissingPackageError` if the store's library is missing."""
        return cls(url, open_store(url))


class HostedTiers:
    """A `kvstow_api.directory.HostTier`. Safe from any thread; only `measure` waits. The host makes, steps and closes
    its `FleetTier`s; this object only knows them, from `add` to `remove`."""

    def __init__(self, choice: TierChoice) -> None:
        self.store, self.url = choice.store.name, shown_url(choice.url)
        self._given_url = choice.url
        self._lock = threading.Lock()
        """Held for moments."""
        self._tiers: list[_Tier] = []
        self._ended: dict[TierLabels, TierCounters] = {}
        """What tiers had counted when they were removed."""

    def add(
        self,
        tier: FleetTier,
        *,
        pool: str,
        namespace: str,
        model: str = "",
        clients: Callable[[], Sequence[TierClient]] = tuple,
    ) -> None:
        """Show this tier. `clients`: those of this tier and of its ranks, at this moment; called on any thread, and
        waits for nothing. One that several namespaces of a pool use has the same purpose with each of them, and is
        shown with the first. O(1) for the caller."""
        with self._lock:
            self._tiers.append(_Tier(tier, pool, namespace, model, clients))

    def remove(self, tier: FleetTier) -> None:
        """It is not shown any more, but what it has counted stays in `totals`. Idempotent."""
        with self._lock:
            removed = [one for one in self._tiers if one.tier is tier]
            self._tiers = [one for one in self._tiers if one.tier is not tier]
            self._ended = _summed(self._ended, removed)

    def forget_pool(self, pool: str) -> None:
        """The pool was deleted, after its tiers were removed: another one of this name counts from zero."""
        with self._lock:
            self._ended = {labels: one for labels, one in self._ended.items() if labels[1] != pool}

    def tiers(self) -> list[TierStatus]:
        with self._lock:
            known = list(self._tiers)
        shown: set[tuple[str, str]] = set()
        return [
            replace(
                one.tier.status(),
                pool=one.pool,
                namespace=one.namespace,
                model=one.model,
                clients=tuple(_news(one, shown)),
            )
            for one in known
        ]

    def totals(self) -> dict[TierLabels, TierCounters]:
        with self._lock:  # at once, or a tier that is removed meanwhile would count twice or not at all
            known, ended = list(self._tiers), self._ended
        shown = {one.labels for one in known}
        return _summed({labels: one for labels, one in ended.items() if labels in shown}, known)

    def measure(self) -> TierMeasurements:
        """See `measure_store`."""
        return measure_store(self._given_url)


def _news(one: _Tier, shown: set[tuple[str, str]]) -> Iterator[TierClient]:
    """Its clients, but those that another namespace of its pool has shown."""
    for client in one.clients():
        if (one.pool, client.purpose) not in shown:
            shown.add((one.pool, client.purpose))
            yield client


def _summed(totals: Mapping[TierLabels, TierCounters], tiers: Iterable[_Tier]) -> dict[TierLabels, TierCounters]:
    """`totals`, and what `tiers` have counted."""
    sums = dict(totals)
    for one in tiers:
        counted = one.tier.status().counters
        sums[one.labels] = sums[one.labels] + counted if one.labels in sums else counted
    return sums


class _Tier(NamedTuple):
    tier: FleetTier
    pool: str
    namespace: str
    model: str
    clients: Callable[[], Sequence[TierClient]]

    @property
    def labels(self) -> TierLabels:
        return self.tier.status().store, self.pool, self.model
