"""The store that a setting names, what may be said of its URL, and who can reach it."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvstow.errors import ConfigError
from kvstow.tier.store import TierStore
from kvstow_api.directory import TierMeasurements
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
