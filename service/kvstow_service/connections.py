"""The open connections of the admin server: how many there may be, and how long each may keep the server waiting."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from enum import Enum, auto

from kvstow_service.limitedlog import LimitedLog

logger = logging.getLogger("kvstow.server")

_MOST_CONNECTIONS = 256
_FEWEST_CONNECTIONS = 16
_SHARE_OF_DESCRIPTORS = 8  # the other seven eighths are the engine's


class Wait(Enum):
    """What the server waits for on a connection."""

    HANDSHAKE = auto()
    """The client's part of a TLS handshake."""
    HEAD = auto()
    """A whole request head: the first one, or the next one after an answer."""
    READER = auto()
    """The client reads too little of what has been written."""
    CLOSE = auto()
    """The connection is closed as soon as the client has read the rest."""

    @property
    def seconds(self) -> float:
        """How long the server waits."""
        return _SECONDS[self]


_SECONDS = {Wait.HANDSHAKE: 10.0, Wait.HEAD: 10.0, Wait.READER: 30.0, Wait.CLOSE: 5.0}


class Connection:
    """One accepted socket, from the moment it is accepted until it is closed.

    `trusted`: its client has shown a credential, or came through a Unix socket, which only this user can open.
    `drop` closes it at once, without a word to the client.
    """

    __slots__ = ("_clock", "_close", "drop", "since", "trusted", "wait")

    def __init__(
        self, *, trusted: bool, wait: Wait, clock: Callable[[], float], close: Callable[[Connection], None]
    ) -> None:
        self._clock = clock
        self._close = close
        self.trusted = trusted
        self.drop: Callable[[], object] = lambda: None
        self.wait: Wait | None = wait
        self.since = clock()

    def wait_for(self, wait: Wait | None) -> None:
        """What the server waits for from now on; None while it works on a request. Naming the same thing again does
        not extend the time."""
        if wait is not self.wait:
            self.wait = wait
            self.since = self._clock()

    def closed(self) -> None:
        """It no longer counts. Idempotent."""
        self._close(self)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The connection with the lowest rank is the first to make room for another."""
        return self.trusted, self.wait is None, self.since


class Connections:
    """Never more than `limit`. All methods run on the event loop, and cost at most O(limit).

    A new connection beyond the limit takes the place of another: first of the stranger who has kept the server waiting
    longest, then of the stranger served longest, then of the idle trusted one. It is refused only when all are trusted
    and busy. So neither probes nor operators are locked out by clients who merely hold connections.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._open: set[Connection] = set()
        self._full = LimitedLog(logger, clock)

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, *, trusted: bool, wait: Wait) -> Connection | None:
        """The record of a socket that has been accepted, or None if it must be closed."""
        if len(self._open) >= self.limit:
            made_room = self.make_room()
            self._full.warning(
                "the admin server has %d connections, as many as it may: %s",
                self.limit,
                "one was closed for a new one" if made_room else "a new one was refused",
            )
            if not made_room:
                return None
        connection = Connection(trusted=trusted, wait=wait, clock=self._clock, close=self._open.discard)
        self._open.add(connection)
        return connection

    def make_room(self) -> bool:
        """Drop the connection that matters least; False if there is none that may be dropped."""
        victim = min(self._open, key=lambda connection: connection.rank, default=None)
        if victim is None or (victim.trusted and victim.wait is None):
            return False
        self._drop(victim)
        return True

    def expire(self) -> None:
        """Drop those that have kept the server waiting for too long; call it about once a second."""
        now = self._clock()
        for connection in list(self._open):
            if connection.wait is not None and now - connection.since > connection.wait.seconds:
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.drop()


def connection_limit() -> int:
    """How many connections the server may hold: few enough to leave the process's descriptors to the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // _SHARE_OF_DESCRIPTORS
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, share))
