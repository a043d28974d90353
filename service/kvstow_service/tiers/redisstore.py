"""Redis or Valkey as the store of a tier: with TLS and access lists, and one copy more than a store that reads and
writes memory itself.

A URL in a setting says where it is. Each connection is for one kind of call, with a deadline for every call."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstow.errors import ConfigError, MissingPackageError, SettingError, TierTimeoutError, TierUnavailableError
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    MemoryRange,
    ObjectName,
    PutStatus,
    SlotObject,
    check_batch,
)
from kvstow_api.hostsettings import read_regular_file
from kvstow_service.admin.tls import in_memory

if TYPE_CHECKING:
    from redis.connection import Connection


SCHEMES = ("redis", "rediss")
FORM = "redis://[USER@]HOST:PORT, or rediss:// for TLS, with options such as ?password_file=FILE"

_OPTIONS = ("ca_file", "certificate_file", "key_file", "password_file")


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A server, and how to log in. Files are read for each connection, because passwords and certificates change."""

    host: str
    port: int
    user: str | None = None
    password_file: Path | None = None
    is_tls: bool = False
    ca_file: Path | None = None
    """Of the authorities that may have signed the server's certificate; None: those of the system."""
    certificate_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def parse(cls, url: str) -> RedisLocation:
        """Raises `ConfigError`, which names the part that is wrong and never repeats
        a password."""
        try:
            parts = urlsplit(url)
            host, port, password = parts.hostname, parts.port, parts.password
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigError("tier", url.rpartition("@")[2], FORM) from None
        if password is not None:
            raise ConfigError("tier", "a URL with a password", "a password in a file, with ?password_file=FILE")
        if parts.scheme not in SCHEMES or not host or not port or parts.path not in ("", "/") or parts.fragment:
            raise ConfigError("tier", url, FORM)
        options: dict[str, Path] = {}
        for name, value in given:
            if name not in _OPTIONS:
                raise ConfigError(f"tier option {name}", value, f"only the options {', '.join(_OPTIONS)}")
            if name in options or not value:
                raise ConfigError(f"tier option {name}", value, "the path of a file, once")
            options[name] = Path(value)
        is_tls = parts.scheme == "rediss"
        for name in ("ca_file", "certificate_file", "key_file"):
            if name in options and not is_tls:
                raise ConfigError(f"tier option {name}", str(options[name]), "files of TLS, with rediss://")
        if ("certificate_file" in options) != ("key_file" in options):
            raise ConfigError("tier", url, "certificate_file and key_file together")
        user = unquote(parts.username) if parts.username else None
        if user and "password_file" not in options:
            raise ConfigError("tier", url, "a user with ?password_file=FILE")
        return cls(host, port, user, is_tls=is_tls, **options)

    def check_files(self) -> None:
        """Raises `SettingError` for a file that cannot be read."""
        for option in _OPTIONS:
            try:
                self._read(option)
            except OSError as error:
                name = f"tier option {option}"
                raise SettingError(name, getattr(self, option), f"cannot be read: {error.strerror}") from None

    def content(self, option: str) -> bytes | None:
        """Of the file that an option names; None without the option. Raises `TierUnavailableError`, which does not name
        the file: every reader of the admin API sees it."""
        try:
            return self._read(option)
        except OSError as error:
            raise TierUnavailableError(f"{self}: {option} cannot be read: {error.strerror}") from None

    def password(self) -> str | None:
        """Raises `TierUnavailableError`."""
        content = self.content("password_file")
        try:
            return None if content is None else content.decode().strip()
        except UnicodeDecodeError:
            raise TierUnavailableError(f"{self}: password_file is not text") from None

    def _read(self, option: str) -> bytes | None:
        path: Path | None = getattr(self, option)
        return None if path is None else read_regular_file(path)[0]

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}"


_TLS_FILES = {"ca_file": "ssl_ca_certs", "certificate_file": "ssl_certfile", "key_file": "ssl_keyfile"}
"""Options of the location, and what redis-py calls them."""


class RedisRefusal(NamedTuple):
    """The error that the server sent instead of an answer."""

    text: str
    is_full: bool
    is_other_type: bool
    """The key has a value of another type than a string."""


Ask = Callable[[Sequence[Sequence[Any]]], Iterator[Any]]


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
    def call(self, timeout: float) -> Iterator[Ask]:
        """What is asked in it ends at the same time; the wait for another call does not count. Raises
        `TierUnavailableError`."""
        with self._lock:
            end = time.monotonic() + timeout
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            from redis.exceptions import RedisError
            from redis.exceptions import TimeoutError as RedisTimeoutError

            try:
                yield partial(_ask, self._connected(end), end)
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


def _ask(connection: Connection, end: float, commands: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Send all commands, and take an answer for each, until `end`."""
    from redis.exceptions import OutOfMemoryError, ResponseError

    def limit() -> None:
        left, found = end - time.monotonic(), _socket_of(connection)
        if left <= 0:
            raise TimeoutError
        if found is None:
            raise ConnectionError("the connection was closed")
        found.settimeout(left)

    limit()
    connection.send_packed_command(connection.pack_commands(commands))
    for _ in commands:
        limit()
        try:
            yield connection.read_response()
        except ResponseError as error:
            text = str(error)
            yield RedisRefusal(text, isinstance(error, OutOfMemoryError), text.startswith("WRONGTYPE"))


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
            options["ssl_password"] = ""  # None would prompt on the terminal for that of an encrypted key
        yield SSLConnection(**options) if location.is_tls else Connection(**options)


def _socket_of(connection: Connection) -> socket.socket | None:
    """redis-py has no other way to change the timeout of a connection that is in use, or to wake its reader."""
    found: socket.socket | None = connection._sock
    return found


_NAMES_IN_REQUEST = 500
_BYTES_IN_REQUEST = 8 << 20  # values of one request and its answers, which are in memory twice


class RedisStore:
    """See `kvstow.tier.store.TierStore`. Each client has a connection for each kind of call, in this process."""

    name = "redis"

    def __init__(self, location: RedisLocation) -> None:
        """Raises `MissingPackageError`, or `SettingError` for a file that cannot be read."""
        for package in ("redis", "xxhash"):
            if find_spec(package) is None:
                raise MissingPackageError("a tier in Redis", package, "redis")
        location.check_files()
        self._location = location

    def open_transfers(self, witness: int | None = None) -> RedisTransfers:
        return RedisTransfers(self._location)

    def open_lookups(self) -> RedisLookups:
        return RedisLookups(self._location)


class _Client:
    """A lane for each kind of call. They count as connected until a call fails: nobody is to wait for a connection that
    the first call makes."""

    def __init__(self, location: RedisLocation, num_lanes: int) -> None:
        self._lanes = [RedisLane(location) for _ in range(num_lanes)]
        self._is_closed = False

    def health(self) -> ClientHealth:
        if self._is_closed:
            return ClientHealth("closed", "it was closed")
        problem = next((lane.problem for lane in self._lanes if lane.problem), "")
        return ClientHealth("connecting", problem) if problem else ClientHealth("connected")

    def stats(self) -> ClientStats:
        restarts = sum(max(0, lane.connects - 1) for lane in self._lanes)
        return ClientStats(timeouts=sum(lane.timeouts for lane in self._lanes), restarts=restarts)

    def close(self) -> None:
        self._is_closed = True
        for lane in self._lanes:
            lane.close()


class RedisTransfers(_Client):
    """See `kvstow.tier.store.TransferClient`. Slots are read and written by the thread of the call alone."""

    def __init__(self, location: RedisLocation) -> None:
        super().__init__(location, 2)
        self._puts, self._gets = self._lanes
        self._ranges: tuple[MemoryRange, ...] = ()

    def add_memory(self, memory: MemoryRange) -> None:
        self._ranges = (*self._ranges, memory)

    def remove_memory(self, memory: MemoryRange) -> None:
        self._ranges = tuple(one for one in self._ranges if one.address != memory.address)

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        from kvstow_service.tiers.objectheader import pack_header

        check_batch(objects, self._ranges)
        statuses: list[PutStatus] = []
        refused = ""
        with self._puts.call(timeout) as ask:
            for part in _parts(objects):
                commands = []
                for one in part:
                    slot, name = _slot(one), str(one.name)
                    commands.append(("SET", name, pack_header(one.name.fingerprint, name, slot) + bytes(slot), "NX"))
                for answer in ask(commands):
                    if isinstance(answer, RedisRefusal):
                        refused = answer.text
                        statuses.append("full" if answer.is_full else "failed")
                    else:
                        statuses.append("stored")  # None: it was there
        if statuses and set(statuses) == {"failed"}:
            raise TierUnavailableError(f"Redis refuses to store: {refused}")
        return statuses

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        check_batch(objects, self._ranges)
        statuses: list[GetStatus] = []
        refused = ""
        with self._gets.call(timeout) as ask:
            for part in _parts(objects):
                for one, answer in zip(part, ask([("GET", str(one.name)) for one in part]), strict=True):
                    if isinstance(answer, RedisRefusal):
                        refused = answer.text
                    statuses.append(_take(one, answer))
            wrong = [str(one.name) for one, status in zip(objects, statuses, strict=True) if status == "corrupt"]
            if wrong:  # the store would keep them, and refuse better ones
                list(ask([("UNLINK", *wrong)]))
        if statuses and set(statuses) == {"failed"}:
            raise TierUnavailableError(f"Redis refuses to answer: {refused}")
        return statuses


class RedisLookups(_Client):
    """See `kvstow.tier.store.LookupClient`."""

    def __init__(self, location: RedisLocation) -> None:
        super().__init__(location, 1)
        (self._exists,) = self._lanes

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        found: list[bool] = []
        with self._exists.call(timeout) as ask:
            for at in range(0, len(names), _NAMES_IN_REQUEST):
                part = names[at : at + _NAMES_IN_REQUEST]
                for answer in ask([("EXISTS", str(name)) for name in part]):
                    if isinstance(answer, RedisRefusal):
                        raise TierUnavailableError(f"Redis refuses to answer: {answer.text}")
                    found.append(bool(answer))
        return found


def _take(one: SlotObject, answer: Any) -> GetStatus:
    """Verify a value, and copy it into its slot."""
    from kvstow_service.tiers.objectheader import HEADER_BYTES, find_mismatch

    if isinstance(answer, RedisRefusal):
        return "corrupt" if answer.is_other_type else "failed"
    if answer is None:
        return "missing"
    value = memoryview(answer)
    if len(value) != HEADER_BYTES + one.num_bytes:
        return "corrupt"
    header, slot = bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:]
    if find_mismatch(header, one.name.fingerprint, str(one.name), slot) is not None:
        return "corrupt"
    _slot(one)[:] = slot
    return "found"


def _slot(one: SlotObject) -> memoryview:
    return memoryview((ctypes.c_ubyte * one.num_bytes).from_address(one.address)).cast("B")


def _parts(objects: Sequence[SlotObject]) -> Iterator[list[SlotObject]]:
    """As many objects as fit into one request."""
    part: list[SlotObject] = []
    for one in objects:
        if part and sum(other.num_bytes for other in part) + one.num_bytes > _BYTES_IN_REQUEST:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
