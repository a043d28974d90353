"""Mooncake Store as the store of a tier: its location, which the URL of a setting gives, its clients, and the meaning
of its status codes for one object of a batch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from kvstow.errors import ConfigError, MissingPackageError, TierUnavailableError
from kvstow_service.stores.mooncake.childchannel import CONTROL, ChildChannel, ChildProcess
from kvstow_service.stores.mooncake.childmessages import CORRUPT, Connect, Exists, Move
from kvstow_service.stores.mooncake.objects import (
    GetStatus,
    ObjectName,
    PutStatus,
    SlotObject,
)

_log = logging.getLogger("kvstow.tier")

SCHEME = "mooncake"
FORM = "mooncake://MASTER:PORT, with ?ha=etcd where HOST:PORT[,HOST:PORT...] are those of etcd"

_PROTOCOLS = ("tcp", "rdma")
_REPLICAS = ("1", "2", "3", "4", "5", "6", "7", "8")

INVALID_PARAMS = -600
"""The code for a defect of KVStow, or for an object of another length than its name implies."""
_NO_ROOM = -200
_NAMES_IN_MESSAGE = 500  # each has at most 250 bytes
_EXISTS = "exists"


@dataclass(frozen=True, slots=True)
class MooncakeLocation:
    """A store, and how this node reaches it."""

    endpoints: tuple[str, ...]
    """The addresses of the master, or of etcd, as HOST:PORT."""
    is_ha: bool = False
    """Whether the endpoints are those of etcd, which knows the master that leads."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas. If it is empty, Mooncake uses all devices that it finds."""
    host: str = ""
    """The address under which other processes of the store reach this node. If it is empty, the address from which this
    node reaches the master is used."""
    replicas: int = 1

    @classmethod
    def parse(cls, url: str) -> MooncakeLocation:
        """Return the location that a URL describes. Raises `ConfigError`, which names the part that is wrong."""
        try:
            parts = urlsplit(url)
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigError("tier", url, FORM) from None
        if parts.scheme != SCHEME or parts.path not in ("", "/") or parts.fragment:
            raise ConfigError("tier", url, FORM)
        if "@" in parts.netloc:  # the error does not have the URL, which may hold a password
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
        """The master's address in Mooncake's form."""
        return f"etcd://{';'.join(self.endpoints)}" if self.is_ha else self.endpoints[0]

    def local_host(self) -> str:
        """Return this node's address. Raises `OSError` if the master's name cannot be resolved or no route leads
        there."""
        return self.host or _address_towards(self.endpoints[0])

    def __str__(self) -> str:
        return f"{SCHEME}://{','.join(self.endpoints)}"


def _address_towards(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    family, kind, number, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)  # this sends nothing, because it is a datagram socket
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


_MISSING = frozenset({-703, -704, -707})
"""The codes for an object whose replica is not complete, that does not exist, or whose lease ended during the
transfer."""
_RPC_ERRORS = range(-999, -899)
"""The codes for a master that did not answer."""


def put_status(code: int) -> PutStatus:
    if code == 0:
        return "stored"
    return "full" if code == _NO_ROOM else "failed"


def get_status(code: int) -> GetStatus:
    if code == 0:
        return "found"
    if code == CORRUPT:
        return "corrupt"
    return "missing" if code in _MISSING else "failed"


def require_master(codes: Sequence[int]) -> None:
    """Raise `TierUnavailableError` if the master answered for none of the objects."""
    if codes and all(code in _RPC_ERRORS for code in codes):
        raise TierUnavailableError(f"Mooncake's master does not answer (code {codes[0]})")


class MooncakeStore:
    """Opens clients of a Mooncake store; see `kvstow_service.stores.mooncake.objects.MooncakeClients`. Each client has
    a process of its own."""

    def __init__(self, location: MooncakeLocation) -> None:
        """Raises `MissingPackageError` if Mooncake's library or xxhash is not installed."""
        for package in ("mooncake", "xxhash"):
            if find_spec(package) is None:
                raise MissingPackageError("a tier in Mooncake", package, "mooncake")
        self._location = location

    def open_transfers(self, witness: int) -> MooncakeTransfers:
        return MooncakeTransfers(
            "transfers", lambda: ChildProcess((CONTROL, "put", "get"), (witness,)), self._connect_message
        )

    def open_lookups(self) -> MooncakeLookups:
        return MooncakeLookups("look-ups", lambda: ChildProcess((CONTROL, _EXISTS)), self._connect_message)

    def _connect_message(self) -> Connect:
        where = self._location
        return Connect(where.local_host(), where.master, where.protocol, where.devices, where.replicas)


class MooncakeTransfers(ChildChannel):
    """A client for transfers; see `kvstow_service.stores.mooncake.objects.TransferClient`. Its process maps the memory
    of the ranks."""

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        return [put_status(code) for code in self._move("put", objects, timeout)]

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        return [get_status(code) for code in self._move("get", objects, timeout)]

    def _move(self, kind: Literal["put", "get"], objects: Sequence[SlotObject], timeout: float) -> tuple[int, ...]:
        codes = self.call(kind, Move(kind, tuple(objects)), timeout)
        require_master(codes)
        if INVALID_PARAMS in codes:
            _log.error("Mooncake has refused %d of %d %ss as invalid", codes.count(INVALID_PARAMS), len(codes), kind)
        return codes


class MooncakeLookups(ChildChannel):
    """A client for look-ups; see `kvstow_service.stores.mooncake.objects.LookupClient`."""

    def __init__(self, purpose: str, start_child: Callable[[], ChildProcess], connect: Callable[[], Connect]) -> None:
        super().__init__(purpose, start_child, connect)
        self._turn = threading.Lock()

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        texts, found = [str(name) for name in names], list[bool]()
        with self._turn:
            end = time.monotonic() + timeout
            for at in range(0, len(texts), _NAMES_IN_MESSAGE):
                part = tuple(texts[at : at + _NAMES_IN_MESSAGE])
                codes = self.call(_EXISTS, Exists(part), end - time.monotonic())
                require_master(codes)
                found.extend(code == 1 for code in codes)
        return found
