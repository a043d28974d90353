"""Connections to Redis: each for one kind of call, with a deadline for every call."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.errors import TierTimeoutError, TierUnavailableError
from kvstow_service.tiers.redislocation import RedisLocation

if TYPE_CHECKING:
    from redis.connection import Connection


class Refused(NamedTuple):
    """What the server said instead of an answer."""

    text: str
    is_full: bool


class RedisLane:
    """A connection for one kind of call, one call at a time. It is made by the first call, and made anew after a call
    that failed."""

    def __init__(self, location: RedisLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._is_closed = False
        self.problem = ""
        """Why the last call failed; empty if it did not, or if there was none."""
        self.connects = self.timeouts = 0

    @contextmanager
    def call(self, timeout: float) -> Iterator[RedisCall]:
        """Raises `TierUnavailableError`."""
        end = time.monotonic() + timeout
        with self._lock:
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            from redis.exceptions import RedisError
            from redis.exceptions import TimeoutError as RedisTimeoutError

            try:
                yield RedisCall(self._connected(end), end)
            except (RedisTimeoutError, TimeoutError):
                self.timeouts += 1
                self._drop(f"{self._location} did not answer for {timeout:.3g} s")
                raise TierTimeoutError(self.problem) from None
            except (RedisError, OSError) as error:
                self._drop(f"{self._location}: {error}")
                raise TierUnavailableError(self.problem) from None
            except TierUnavailableError as error:  # answers may be left, which are not those of the next call
                self._drop(str(error))
                raise

    def is_in_use(self) -> bool:
        return self._lock.locked()

    def close(self) -> None:
        """Ends the call under way, and waits until it has ended. Idempotent."""
        self._is_closed = True
        connection = self._connection
        if connection is not None and (end := _socket_of(connection)) is not None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop("it was closed")

    def _connected(self, end: float) -> Connection:
        if self._connection is None:
            self._connection = _connect(self._location, max(0.001, end - time.monotonic()))
            self._connection.connect()
            self.connects += 1
            self.problem = ""
        return self._connection

    def _drop(self, problem: str) -> None:
        self.problem = problem
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


class RedisCall:
    """Requests of one call, which end at the same time."""

    def __init__(self, connection: Connection, end: float) -> None:
        self._connection, self._end = connection, end

    def ask(self, commands: Sequence[Sequence[Any]]) -> Iterator[Any]:
        """Send all commands, and take an answer for each."""
        from redis.exceptions import OutOfMemoryError, ResponseError

        self._limit()
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        for _ in commands:
            self._limit()
            try:
                yield self._connection.read_response()
            except ResponseError as error:
                yield Refused(str(error), isinstance(error, OutOfMemoryError))

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        end = _socket_of(self._connection)
        if end is None:
            raise ConnectionError("the connection was closed")
        end.settimeout(left)


def _connect(location: RedisLocation, timeout: float) -> Connection:
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry

    options: dict[str, Any] = {
        "host": location.host,
        "port": location.port,
        "username": location.user,
        "password": location.password(),
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),  # a call that failed is the engine's to repeat
        "protocol": 2,
    }
    if not location.is_tls:
        return Connection(**options)
    files = {
        "ssl_ca_certs": location.ca_file,
        "ssl_certfile": location.certificate_file,
        "ssl_keyfile": location.key_file,
    }
    return SSLConnection(**options, **{name: str(path) for name, path in files.items() if path is not None})


def _socket_of(connection: Connection) -> socket.socket | None:
    """redis-py has no other way to change the timeout of a connection that is in use, or to wake its reader."""
    found: socket.socket | None = connection._sock
    return found
