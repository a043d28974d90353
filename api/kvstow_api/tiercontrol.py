"""What the admin API asks of a host about its fleet tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow.tier.writepolicy import WriteMode

if TYPE_CHECKING:
    from kvstow_api.operations import Sweeping


@dataclass(frozen=True, slots=True)
class AttachedStore:
    """The store that a host uses. `url` has no secrets and no paths of files: every reader sees it."""

    name: str
    url: str
    write: WriteMode


@dataclass(frozen=True, slots=True)
class TierClient:
    """One client of the store: a connection, or a process. `purpose`: what for, such as `transfers of rank 0`."""

    purpose: str
    health: ClientHealth
    stats: ClientStats


@dataclass(frozen=True, slots=True)
class HostedTier:
    """The tier of one namespace of a pool. `fingerprint`: what its objects are known by; None while it is off.
    `bypass_seconds_left`: None while it is not bypassed, or without end. `clients`: of this namespace; one that several
    namespaces of a pool use is listed with one of them."""

    pool: str
    namespace: str
    model: str
    fingerprint: str | None
    status: TierStatus
    bypass_seconds_left: float | None
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


class TierBypass(NamedTuple):
    """Whether the store is left alone in all pools; `seconds_left` is None without end."""

    bypassed: bool
    seconds_left: float | None


class TierMeasurements(NamedTuple):
    """What the doctor has to know. `public_addresses`: addresses of the store that anyone on the internet may reach.
    `has_access_control`: the store asks who its clients are. `pins_memory`: the clients lock the memory of the pools;
    `memlock_bytes`: how much they may lock, None for any amount."""

    public_addresses: tuple[str, ...] = ()
    has_access_control: bool = True
    pins_memory: bool = False
    memlock_bytes: int | None = None


class TierControl(Protocol):
    """The fleet tier of a host. Calls are safe from any thread and wait for nothing, except those that say so: these
    are made on a thread of their own, never on the event loop."""

    @property
    def can_attach(self) -> bool:
        """Whether a store can be attached, and detached, while the host runs."""

    @property
    def store(self) -> AttachedStore | None:
        """None while no store is attached."""

    @property
    def bypass(self) -> TierBypass:
        """Of the whole host."""

    def tiers(self) -> Sequence[HostedTier]:
        """One for each namespace that could use the store, the oldest first; none while no store is attached."""

    def totals(self) -> Mapping[TierLabels, TierTotals]:
        """Of all namespaces that have used the store since it was attached, those that have ended included, so that no
        total ever falls. Only of pools that `tiers` has, too."""

    def attach(self, url: str, write: WriteMode | None) -> AttachedStore:
        """Use a store; it need not be there yet. `write` None: the default. Waits. Raises `ConfigError` for a URL that
        cannot be used, and `ConflictError` if a store is attached, or none can be."""

    def detach(self) -> None:
        """Stop using the store. Waits until nothing of it touches any memory, for as long as calls under way may take.
        Raises `ConflictError`."""

    def set_bypass(self, *, bypassed: bool, ttl_seconds: float | None, pool: str | None) -> TierBypass:
        """Leave the store alone, for so long or (None) until it is to be used again: in all pools, those to come
        included, or in one. A switch of the host replaces those of single pools."""

    def name_weights(self, pool: str, namespace: str | None, weights_id: str) -> None:
        """Name the weights that the engine has now, after keys have lost their meaning. `namespace` None: the only one
        of the pool. The name counts from the engine's next step on, if no other reset comes first. Raises
        `NotFoundError`, and `ConflictError` if the weights have a name already, or cannot have one."""

    def purge(self, fingerprint: str) -> Sweeping:
        """Begin to remove all objects of a fingerprint from the store, also for the other nodes. Its steps wait, and
        its `done` are the objects that were removed. Raises `ConflictError` if no store is attached."""

    def measure(self) -> TierMeasurements:
        """Waits for the resolution of names."""
