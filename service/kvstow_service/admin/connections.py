"""The admin server's open connections: their number is limited, and each has a deadline while the server waits."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

from kvstow_api.limitedlog import LimitedLog

logger = logging.getLogger("kvstow.server")

_MAX_CONNECTIONS = 256
_MIN_CONNECTIONS = 16
_IDLE_SECONDS = 1.0  # a younger connection may not have had time to send its request
_SHARE_OF_DESCRIPTORS = 8  # the engine keeps the other seven eighths


class Wait(Enum):
    """What the server waits for on a connection."""

    HANDSHAKE = auto()
    """The client must finish the TLS handshake."""
    HEAD = auto()
    """The client must send a whole request head, its first or its next."""
    READER = auto()
    """The client must read what has been written."""
    CLOSE = auto()
    """The client must read the rest before the connection closes."""

    @property
    def seconds(self) -> float:
        """Time limit."""
        return _SECONDS[self]


_SECONDS = {Wait.HANDSHAKE: 10.0, Wait.HEAD: 10.0, Wait.READER: 30.0, Wait.CLOSE: 5.0}


class Connection:
    """One accepted socket, until it is closed.

    `client`: the peer's address. `trusted`: it has shown a credential, or came through a Unix socket, which only this
    user can open. `drop` closes it at once, without a response.
    """

    __slots__ = ("_clock", "_close", "client", "drop", "opened", "since", "trusted", "wait")

    def __init__(
        self, client: str, *, trusted: bool, wait: Wait, clock: Callable[[], float], close: Callable[[Connection], None]
    ) -> None:
        self._clock = clock
        self._close = close
        self.client = client
        self.trusted = trusted
        self.drop: Callable[[], object] = lambda: None
        self.wait: Wait | None = wait
        self.opened = self.since = clock()

    def wait_for(self, wait: Wait | None) -> None:
        """Set what the server waits for; None while it handles a request. Repeating the same `wait` does not extend the
        deadline."""
        if wait is not self.wait:
            self.wait = wait
            self.since = self._clock()

    def closed(self) -> None:
        """Stop counting it. Idempotent."""
        self._close(self)


class Connections:
    """At most `limit` connections. All methods run on the event loop and cost at most O(limit).

    At the limit, a new connection replaces an untrusted one from the address with the most of them: the one idle
    longest, or else the oldest. If none is untrusted, it replaces an idle trusted one; it is refused only when all
    are trusted and busy. So a probe, which is new and brief, survives a flood, especially one from another address.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._open: set[Connection] = set()
        self._full = LimitedLog(logger, clock)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def crowded(self) -> bool:
        """Above half the limit an untrusted connection serves one request: otherwise pipelined requests would keep the
        server busy, and a probe would wait for each of them."""
        return len(self._open) > self.limit // 2

    def admit(self, client: str, *, trusted: bool, wait: Wait) -> Connection | None:
        """The record of an accepted socket, or None if the caller must close it."""
        if len(self._open) >= self.limit:
            made_room = self.make_room()
            self._full.warning(
                "the admin server has reached its limit of %d connections: %s",
                self.limit,
                "one was closed for a new one" if made_room else "a new one was refused",
            )
            if not made_room:
                return None
        connection = Connection(client, trusted=trusted, wait=wait, clock=self._clock, close=self._open.discard)
        self._open.add(connection)
        return connection

    def make_room(self) -> bool:
        """Drop the least important connection; False if none may be dropped."""
        victim = self._least()
        if victim is None:
            return False
        self._drop(victim)
        return True

    def expire(self) -> None:
        """Drop connections past their deadline. Call it about once a second."""
        now = self._clock()
        for connection in list(self._open):
            if connection.wait is not None and now - connection.since > connection.wait.seconds:
                self._drop(connection)

    def _least(self) -> Connection | None:
        """The least important connection, if any may be dropped."""
        strangers = [connection for connection in self._open if not connection.trusted]
        if not strangers:
            idle = [connection for connection in self._open if connection.wait is not None]
            return min(idle, key=lambda connection: connection.since, default=None)
        per_client = Counter(connection.client for connection in strangers)
        now = self._clock()

        def rank(connection: Connection) -> tuple[int, bool, float]:
            idle = connection.wait is not None and now - connection.since >= _IDLE_SECONDS
            return -per_client[connection.client], not idle, connection.since if idle else connection.opened

        return min(strangers, key=rank)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.drop()


def connection_limit() -> int:
    """How many connections the server may hold: few enough to leave most of the process's descriptors to the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // _SHARE_OF_DESCRIPTORS
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, share))
