"""Where a Mooncake Store is, as the URL of a setting says it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from kvstow.errors import ConfigError

SCHEME = "mooncake"
FORM = "mooncake://MASTER:PORT, with ?ha=etcd where HOST:PORT[,HOST:PORT...] are those of etcd"

_PROTOCOLS = ("tcp", "rdma")
_REPLICAS = ("1", "2", "3", "4", "5", "6", "7", "8")


@dataclass(frozen=True, slots=True)
class MooncakeLocation:
    """A store, and how this node reaches it."""

    endpoints: tuple[str, ...]
    """HOST:PORT of the master, or of etcd."""
    is_ha: bool = False
    """The endpoints are etcd's, which names the master that leads."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty: those that Mooncake finds."""
    host: str = ""
    """This node's address, which the store's processes know it by; empty: the one that the master is reached from."""
    replicas: int = 1

    @classmethod
    def parse(cls, url: str) -> MooncakeLocation:
        """Raises `ConfigError`, which names the part that is wrong."""
        try:
            parts = urlsplit(url)
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigError("tier", url, FORM) from None
        if parts.scheme != SCHEME or parts.path not in ("", "/") or parts.fragment:
            raise ConfigError("tier", url, FORM)
        if "@" in parts.netloc:  # without the URL: it may hold a password
            raise ConfigError("tier", "a URL with a user name", "no user name or password: Mooncake knows none")
        options: dict[str, str] = {}
        for name, value in given:
            if name not in _OPTIONS:
                raise ConfigError(f"tier option {name}", value, f"only the options {', '.join(sorted(_OPTIONS))}")
            if name in options:
                raise ConfigError(f"tier option {name}", value, "each option once")
            options[name] = value
        endpoints = tuple(_endpoint(text, url) for text in parts.netloc.split(","))
        is_ha = _one_of("tier option ha", options.get("ha", "none"), ("none", "etcd")) == "etcd"
        if len(endpoints) > 1 and not is_ha:
            raise ConfigError("tier", url, "one master; several endpoints are etcd's, with ?ha=etcd")
        protocol = _one_of("tier option protocol", options.get("protocol", "tcp"), _PROTOCOLS)
        if options.get("devices") and protocol != "rdma":
            raise ConfigError("tier option devices", options["devices"], "RDMA devices, with protocol=rdma")
        replicas = options.get("replicas", "1")
        if replicas not in _REPLICAS:
            raise ConfigError("tier option replicas", replicas, f"a whole number from 1 to {len(_REPLICAS)}")
        return cls(endpoints, is_ha, protocol, options.get("devices", ""), options.get("host", ""), int(replicas))

    @property
    def master(self) -> str:
        """The master's address as Mooncake wants it."""
        return f"etcd://{';'.join(self.endpoints)}" if self.is_ha else self.endpoints[0]

    def local_host(self) -> str:
        """This node's address. Raises `OSError` if the master's name cannot be resolved or no route leads there."""
        return self.host or _address_towards(self.endpoints[0])

    def __str__(self) -> str:
        return f"{SCHEME}://{','.join(self.endpoints)}"


def _address_towards(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    family, kind, number, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _endpoint(text: str, url: str) -> str:
    host, _, port = text.rpartition(":")
    if not host.strip("[]") or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("tier", url, FORM)
    return text


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(name, value, ", ".join(allowed))
    return value


_OPTIONS: frozenset[str] = frozenset({"ha", "protocol", "devices", "host", "replicas"})
