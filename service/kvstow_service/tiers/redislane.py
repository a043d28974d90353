"""Connections to Redis: each for one kind of call, with a deadline for every call."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.errors import TierTimeoutError, TierUnavailableError
from kvstow_service.pemfile import in_memory
from kvstow_service.tiers.redislocation import RedisLocation

if TYPE_CHECKING:
    from redis.connection import Connection


_TLS_FILES = {"ca_file": "ssl_ca_certs", "certificate_file": "ssl_certfile", "key_file": "ssl_keyfile"}
"""Options of the location, and what redis-py calls them."""


class Refused(NamedTuple):
    """What the server said instead of an answer."""

    text: str
    is_full: bool
    is_other_type: bool
    """The key has a value of another type than a string."""


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
            with _prepared(self._location, max(0.001, end - time.monotonic())) as connection:
                self._connection = connection
                connection.connect()
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
                text = str(error)
                yield Refused(text, isinstance(error, OutOfMemoryError), text.startswith("WRONGTYPE"))

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        end = _socket_of(self._connection)
        if end is None:
            raise ConnectionError("the connection was closed")
        end.settimeout(left)


@contextmanager
def _prepared(location: RedisLocation, timeout: float) -> Iterator[Connection]:
    """A connection that is to be made. Raises `TierUnavailableError` for a file that cannot be read."""
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
    with ExitStack() as files:
        if location.is_tls:
            for option, argument in _TLS_FILES.items():
                content = location.content(option)
                options[argument] = None if content is None else files.enter_context(in_memory(content))
        yield SSLConnection(**options) if location.is_tls else Connection(**options)


def _socket_of(connection: Connection) -> socket.socket | None:
    """redis-py has no other way to change the timeout of a connection that is in use, or to wake its reader."""
    found: socket.socket | None = connection._sock
    return found
