"""The fleet tier of a host, as its operators see it: the store that a setting names, what may be said of the store's
URL, and who can reach the store."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvstow.control.fleettier import FleetTier
from kvstow.errors import ConfigError, ConflictError, NotFoundError
from kvstow.tier.store import TierStore
from kvstow.tier.tierstatus import TierClient, TierCounters, TierStatus
from kvstow_api.directory import TierLabels, TierMeasurements
from kvstow_service.tiers import redisstore
from kvstow_service.tiers.mooncake import mooncakestore
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore
from kvstow_service.tiers.redisstore import RedisStore

_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14


def shown_url(url: str) -> str:
    """The URL without user, password and paths of files: every reader of the admin API sees it.

    >>> shown_url("rediss://kvstow@cache:6379?password_file=/etc/secret")
    'rediss://cache:6379'
    """
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if not name.endswith("_file")]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, urlencode(options, safe=":,/"), ""))


def measure_store(url: str) -> TierMeasurements:
    """What the doctor has to know of the store at `url`. Waits for the resolution of names."""
    scheme = urlsplit(url).scheme
    if scheme == mooncakestore.SCHEME:
        where = mooncakestore.MooncakeLocation.parse(url)
        hosts = [endpoint.rpartition(":")[0].strip("[]") for endpoint in where.endpoints]
        return TierMeasurements(_public(hosts), False, where.protocol == "rdma", _memlock_bytes())
    server = redisstore.RedisLocation.parse(url)
    has_access_control = server.password_file is not None or server.certificate_file is not None
    return TierMeasurements(_public([server.host]), has_access_control)


def _public(hosts: Iterable[str]) -> tuple[str, ...]:
    """Those addresses of these hosts that the internet knows. A name that cannot be resolved has none: the clients say
    so."""
    addresses: dict[str, None] = {}
    for host in hosts:
        with suppress(OSError):
            for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                addresses[str(address[0])] = None
    return tuple(address for address in addresses if ip_address(address.partition("%")[0]).is_global)


def _memlock_bytes(status: Path = _STATUS) -> int | None:
    """How much this process may lock in memory, and so may its children; None for any amount."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = status.read_text().splitlines()
    capabilities = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return None if limit == resource.RLIM_INFINITY or capabilities >> _CAP_IPC_LOCK & 1 else limit


def open_store(url: str) -> TierStore:
    """Waits for nothing: whether the store is there shows in the health of its clients. Raises `ConfigError`, or
    `MissingPackageError` if the store's library is not installed."""
    scheme = url.partition("://")[0]
    if scheme == mooncakestore.SCHEME:
        return MooncakeStore(mooncakestore.MooncakeLocation.parse(url))
    if scheme in redisstore.SCHEMES:
        return RedisStore(redisstore.RedisLocation.parse(url))
    raise ConfigError("tier", url, f"{mooncakestore.FORM}; {redisstore.FORM}")


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
        prefetch: Callable[[bytes], int | None] = lambda context: None,
    ) -> None:
        """Show this tier. `clients`: those of this tier and of its ranks, at this moment; called on any thread, and
        waits for nothing. One that several namespaces of a pool use has the same purpose with each of them, and is
        shown with the first. `prefetch`: see `NamespaceTier.prefetch`. O(1) for the caller."""
        with self._lock:
            self._tiers.append(_Tier(tier, pool, namespace, model, clients, prefetch))

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

    def prefetch(self, pool: str, context: bytes) -> int:
        with self._lock:
            known = [one for one in self._tiers if one.pool == pool]
        counts = [count for one in known if (count := one.prefetch(context)) is not None]
        if counts:
            return sum(counts)
        if not any(one.tier.may_fetch for one in known):
            raise ConflictError(f"pool {pool} does not use the store now: `kvstow get tier` says why")
        raise NotFoundError(f"no request of context {context.hex()} is known")

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
    prefetch: Callable[[bytes], int | None]

    @property
    def labels(self) -> TierLabels:
        return self.tier.status().store, self.pool, self.model
