"""The store that a setting names, what may be said of its URL, and who can reach it."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from kvstow.errors import ConfigError
from kvstow.tier.blockstore import BlockStore
from kvstow_api.directory import TierMeasurements
from kvstow_service.stores.mooncake import mooncakestore
from kvstow_service.stores.mooncake.mooncakeblocks import MooncakeBlocks
from kvstow_service.stores.mooncake.mooncakestore import MooncakeStore

_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14


def shown_url(url: str) -> str:
    """The URL without a user and a password, which a mistaken setting may have: every reader of the admin API sees it.

    >>> shown_url("mooncake://user:secret@master:50051?protocol=rdma")
    'mooncake://master:50051?protocol=rdma'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def measure_store(url: str | None) -> TierMeasurements:
    """What the doctor has to know of the store at `url`; None: it is no other machine's. Waits for the resolution of
    names."""
    if url is None:
        return TierMeasurements()
    where = mooncakestore.MooncakeLocation.parse(url)
    hosts = [endpoint.rpartition(":")[0].strip("[]") for endpoint in where.endpoints]
    return TierMeasurements(_public(hosts), where.protocol == "rdma", _memlock_bytes())


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


def open_store(url: str) -> BlockStore:
    """Waits for nothing: whether the store is there shows in its parts. Raises `ConfigError`, or `MissingPackageError`
    if the store's library is not installed."""
    if url.partition("://")[0] != mooncakestore.SCHEME:
        raise ConfigError("tier", shown_url(url), mooncakestore.FORM)
    return MooncakeBlocks(MooncakeStore(mooncakestore.MooncakeLocation.parse(url)), shown_url(url))
