"""Opens the store that a setting names, hides secrets of its URL, and finds out who can reach it."""

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
    """Return the URL without a user and a password, which a mistaken setting may have, because every reader of the
    admin API sees it.

    >>> shown_url("mooncake://user:secret@master:50051?protocol=rdma")
    'mooncake://master:50051?protocol=rdma'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def measure_store(url: str | None) -> TierMeasurements:
    """Return what the doctor has to know about the store at `url`. `url` is None if the store is on this machine only.
    Waits until names are resolved."""
    if url is None:
        return TierMeasurements()
    where = mooncakestore.MooncakeLocation.parse(url)
    hosts = [endpoint.rpartition(":")[0].strip("[]") for endpoint in where.endpoints]
    return TierMeasurements(_public(hosts), where.protocol == "rdma", _memlock_bytes())


def _public(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return the public addresses of these hosts. A name that cannot be resolved has none, which the store's clients
    report themselves."""
    addresses: dict[str, None] = {}
    for host in hosts:
        with suppress(OSError):
            for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                addresses[str(address[0])] = None
    return tuple(address for address in addresses if ip_address(address.partition("%")[0]).is_global)


def _memlock_bytes(status: Path = _STATUS) -> int | None:
    """Return how many bytes this process and each of its children may lock in memory; None for any amount."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = status.read_text().splitlines()
    capabilities = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return None if limit == resource.RLIM_INFINITY or capabilities >> _CAP_IPC_LOCK & 1 else limit


def open_store(url: str) -> BlockStore:
    """Return the store at this URL, without waiting for it. Its parts show whether it can be reached. Raises
    `ConfigError`, or `MissingPackageError` if the store's library is not installed."""
    if url.partition("://")[0] != mooncakestore.SCHEME:
        raise ConfigError("tier", shown_url(url), mooncakestore.FORM)
    return MooncakeBlocks(MooncakeStore(mooncakestore.MooncakeLocation.parse(url)), shown_url(url))
