"""Finds the Unix socket of a server on this machine, given its TCP address."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvstow_api.answers import BLOCK_EVENTS, EventType, EventView
from kvstow_api.client import ApiError, Client, Endpoint, Route, routes
from kvstow_api.hostsettings import is_loopback

T = TypeVar("T")

_LISTENING = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_UNIX = "unix:"
_FOR_ADMINS = (routes.list_contexts, routes.get_context, routes.list_blocks, routes.get_block)
"""Reads that show less, or nothing, to callers without a credential."""


class LocalServerClient(Client):
    """Reads over TCP. Changes and reads that need a credential go through the server's Unix socket if the server is on
    this machine, because the socket needs no token."""

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        super().__init__(endpoint, timeout=timeout)
        self._local: Client | None = None

    def call(self, route: Route[T], body: Mapping[str, Any] | None = None, **given: Any) -> T:
        is_open = route.method == "GET" and route not in _FOR_ADMINS
        if self._local is None and not is_open:
            self._local = self._find()
        if self._local is None or is_open:
            return super().call(route, body, **given)
        return self._local.call(route, body, **given)

    def events(
        self,
        types: Sequence[EventType] = (),
        *,
        after: str | None = None,
        recent: int = 0,
        pool: str | None = None,
    ) -> Iterator[EventView]:
        if self._local is None and not set(BLOCK_EVENTS).isdisjoint(types):
            self._local = self._find()
        if self._local is None:
            return super().events(types, after=after, recent=recent, pool=pool)
        return self._local.events(types, after=after, recent=recent, pool=pool)

    def record(self, pool: str, *, seconds: float, max_bytes: int) -> Generator[str, None, None]:
        self._local = self._local or self._find()
        if self._local is None:
            return super().record(pool, seconds=seconds, max_bytes=max_bytes)
        return self._local.record(pool, seconds=seconds, max_bytes=max_bytes)

    def close(self) -> None:
        super().close()
        if self._local is not None:
            self._local.close()

    def _find(self) -> Client | None:
        """Return a client for the server's Unix socket. Returns None if there is none, or if it may be another
        server's: the port may be forwarded from another machine, and any user may listen on a port and name a socket of
        somebody else."""
        address = urlsplit(self._endpoint.url)
        if not is_loopback(address.hostname or ""):
            return None
        try:
            info = super().call(routes.get_info)
        except ApiError:
            return None  # the change itself will fail, and its error says why
        for path in (Path(one.removeprefix(_UNIX)) for one in info.addresses if one.startswith(_UNIX)):
            if not _may_open(path, address.port or (443 if address.scheme == "https" else 80)):
                continue
            local = Client(Endpoint.parse(f"{_UNIX}{path}"), timeout=self._timeout)
            try:
                if local.call(routes.get_info).engine_id == info.engine_id:
                    return local
            except ApiError:
                pass
            local.close()
        return None


def _may_open(path: Path, port: int) -> bool:
    """Whether this user may write to the socket, and the socket belongs to the user who listens on the port."""
    try:
        return {path.stat().st_uid} == _listeners(port) and os.access(path, os.W_OK)
    except OSError:
        return False


def _listeners(port: int) -> set[int]:
    """Return the users who listen on a TCP port of this machine."""
    found = set()
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                found.add(int(uid))
    return found
