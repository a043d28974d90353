"""What the admin API knows of a host's fleet tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierCounters, TierStatus


@dataclass(frozen=True, slots=True)
class TierClient:
    """One client of the store: a connection, or a process. `purpose`: what for, such as `transfers of rank 0`."""

    purpose: str
    health: ClientHealth
    stats: ClientStats


@dataclass(frozen=True, slots=True)
class HostedTier:
    """The tier of one namespace of a pool. `fingerprint`: what its objects are known by; None while it is off.
    `clients`: of this namespace; one that several namespaces of a pool use is listed with one of them."""

    pool: str
    namespace: str
    model: str
    fingerprint: str | None
    status: TierStatus
    clients: tuple[TierClient, ...]


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What namespaces have counted together. The fields are those of `TierStatus`."""

    counters: TierCounters
    dropped_blocks: int
    opened: int

    @classmethod
    def of(cls, status: TierStatus) -> TierTotals:
        return cls(status.counters, status.dropped_blocks, status.opened)

    def __add__(self, other: TierTotals) -> TierTotals:
        return TierTotals(
            self.counters + other.counters,
            self.dropped_blocks + other.dropped_blocks,
            self.opened + other.opened,
        )


TierLabels = tuple[str, str, str]
"""The names of the store, the pool and the model."""


class TierMeasurements(NamedTuple):
    """What the doctor has to know. `public_addresses`: addresses of the store that anyone on the internet may reach.
    `has_access_control`: the store asks who its clients are. `pins_memory`: the clients lock the memory of the pools;
    `memlock_bytes`: how much they may lock, None for any amount."""

    public_addresses: tuple[str, ...] = ()
    has_access_control: bool = True
    pins_memory: bool = False
    memlock_bytes: int | None = None


class HostTier(Protocol):
    """The fleet tier of a host. Calls are safe from any thread, and wait for nothing, except `measure`."""

    @property
    def store(self) -> str:
        """The kind of store, such as `redis`."""

    @property
    def url(self) -> str:
        """Has no secrets and no paths of files: every reader sees it."""

    def tiers(self) -> Sequence[HostedTier]:
        """One for each namespace that could use the store, the oldest first."""

    def totals(self) -> Mapping[TierLabels, TierTotals]:
        """Of all namespaces that have used the store, those that have ended included, so that no total ever falls. Only
        of pools that `tiers` has, too."""

    def measure(self) -> TierMeasurements:
        """Waits for the resolution of names, so it is called on a thread of its own."""
