"""Redis or Valkey as the store of a tier: with TLS and access lists, and one copy more than a store that reads and
writes memory itself."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.errors import MissingPackageError, TierTimeoutError, TierUnavailableError
from kvstow.tier.objectname import ObjectName, fingerprint_prefix
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    MemoryRange,
    PutStatus,
    SlotObject,
    StoreCapacity,
    check_batch,
    count_gets,
    count_puts,
)
from kvstow_service.tiers.redislocation import RedisLocation

if TYPE_CHECKING:
    from redis.connection import Connection

_NAMES_IN_REQUEST = 500
_BYTES_IN_REQUEST = 8 << 20  # values of one request and its answers, which are in memory twice


class RedisStore:
    """See `kvstow.tier.store.TierStore`. Each client has a connection for each kind of call, in this process."""

    name = "redis"

    def __init__(self, location: RedisLocation) -> None:
        """Raises `MissingPackageError`."""
        for package in ("redis", "xxhash"):
            if find_spec(package) is None:
                raise MissingPackageError("a tier in Redis", package, "redis")
        self._location = location

    def open_transfers(self, rank: int, witness: int | None = None) -> RedisTransfers:
        return RedisTransfers(self._location)

    def open_lookups(self) -> RedisLookups:
        return RedisLookups(self._location)


class _Refused(NamedTuple):
    """What the server said instead of an answer."""

    text: str
    is_full: bool


class _Lane:
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
    def call(self, timeout: float) -> Iterator[_Call]:
        """Raises `TierUnavailableError`."""
        end = time.monotonic() + timeout
        with self._lock:
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            from redis.exceptions import RedisError
            from redis.exceptions import TimeoutError as RedisTimeoutError

            try:
                yield _Call(self._connected(end), end)
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


class _Call:
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
                yield _Refused(str(error), isinstance(error, OutOfMemoryError))

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        end = _socket_of(self._connection)
        if end is None:
            raise ConnectionError("the connection was closed")
        end.settimeout(left)


class _Client:
    """What both clients are: a lane for each kind of call, and counters. They count as connected until a call fails:
    nobody is to wait for a connection that the first call makes."""

    def __init__(self, location: RedisLocation, num_lanes: int) -> None:
        self._lanes = [_Lane(location) for _ in range(num_lanes)]
        self._counts = ClientStats()
        self._counting = threading.Lock()
        self._is_closed = False

    def health(self) -> ClientHealth:
        if self._is_closed:
            return ClientHealth("closed", "it was closed")
        problem = next((lane.problem for lane in self._lanes if lane.problem), "")
        return ClientHealth("connecting", problem) if problem else ClientHealth("connected")

    def stats(self) -> ClientStats:
        return replace(
            self._counts,
            timeouts=sum(lane.timeouts for lane in self._lanes),
            restarts=sum(max(0, lane.connects - 1) for lane in self._lanes),
        )

    def is_in_use(self) -> bool:
        """Whether a call is under way."""
        return any(lane.is_in_use() for lane in self._lanes)

    def close(self) -> None:
        self._is_closed = True
        for lane in self._lanes:
            lane.close()

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts = self._counts.plus(**more)


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
        with self._puts.call(timeout) as call:
            for part in _parts(objects):
                commands = []
                for one in part:
                    slot, name = _slot(one), str(one.name)
                    commands.append(("SET", name, pack_header(one.name.fingerprint, name, slot) + bytes(slot), "NX"))
                for answer in call.ask(commands):
                    if isinstance(answer, _Refused):
                        refused = answer.text
                        statuses.append("full" if answer.is_full else "failed")
                    else:
                        statuses.append("stored")  # None: it was there
        if statuses and set(statuses) == {"failed"}:
            raise TierUnavailableError(f"Redis refuses to store: {refused}")
        self._count(**count_puts(objects, statuses))
        return statuses

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        check_batch(objects, self._ranges)
        statuses: list[GetStatus] = []
        refused = ""
        with self._gets.call(timeout) as call:
            for part in _parts(objects):
                for one, answer in zip(part, call.ask([("GET", str(one.name)) for one in part]), strict=True):
                    if isinstance(answer, _Refused):
                        refused = answer.text
                    statuses.append(_take(one, answer))
            wrong = [str(one.name) for one, status in zip(objects, statuses, strict=True) if status == "corrupt"]
            if wrong:  # the store would keep them, and refuse better ones
                list(call.ask([("UNLINK", *wrong)]))
        if statuses and set(statuses) == {"failed"}:
            raise TierUnavailableError(f"Redis refuses to answer: {refused}")
        self._count(**count_gets(objects, statuses))
        return statuses


class RedisLookups(_Client):
    """See `kvstow.tier.store.LookupClient`."""

    def __init__(self, location: RedisLocation) -> None:
        super().__init__(location, 2)
        self.capacity = None if location.capacity is None else StoreCapacity(location.capacity)
        self._exists, self._removals = self._lanes

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        found: list[bool] = []
        with self._exists.call(timeout) as call:
            for at in range(0, len(names), _NAMES_IN_REQUEST):
                part = names[at : at + _NAMES_IN_REQUEST]
                found.extend(bool(_answer(one)) for one in call.ask([("EXISTS", str(name)) for name in part]))
        return found

    def delete(self, names: Sequence[ObjectName], timeout: float) -> int:
        count = 0
        with self._removals.call(timeout) as call:
            for at in range(0, len(names), _NAMES_IN_REQUEST):
                count += _unlink(call, [str(name) for name in names[at : at + _NAMES_IN_REQUEST]])
        return count

    def purge(self, fingerprint: str, timeout: float) -> int:
        """O(objects in the store), in steps that let other clients in between."""
        count, cursor = 0, b"0"
        pattern = f"{_escaped(fingerprint_prefix(fingerprint))}*"
        with self._removals.call(timeout) as call:
            while True:
                (answer,) = call.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", str(_NAMES_IN_REQUEST))])
                cursor, names = _answer(answer)
                if names:
                    count += _unlink(call, names)
                if int(cursor) == 0:
                    return count


def _unlink(call: _Call, names: Sequence[str | bytes]) -> int:
    (answer,) = call.ask([("UNLINK", *names)])
    return int(_answer(answer))


def _answer(answer: Any) -> Any:
    if isinstance(answer, _Refused):
        raise TierUnavailableError(f"Redis refuses to answer: {answer.text}")
    return answer


def _take(one: SlotObject, answer: Any) -> GetStatus:
    """Verify a value, and copy it into its slot."""
    from kvstow_service.tiers.objectheader import HEADER_BYTES, find_mismatch

    if isinstance(answer, _Refused):
        return "failed"
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


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in text)


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
