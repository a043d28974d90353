"""Redis or Valkey as the store of a tier: with TLS and access lists, and one copy more than a store that reads and
writes memory itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from kvstow.errors import MissingPackageError, TierUnavailableError
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    MemoryRange,
    PutStatus,
    SlotObject,
    check_batch,
    count_gets,
    count_puts,
)
from kvstow_service.tiers.redislane import RedisLane, Refused
from kvstow_service.tiers.redislocation import RedisLocation

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

    def open_transfers(self, rank: int, witness: int | None = None) -> RedisTransfers:
        return RedisTransfers(self._location)

    def open_lookups(self) -> RedisLookups:
        return RedisLookups(self._location)


class _Client:
    """What both clients are: a lane for each kind of call, and counters. They count as connected until a call fails:
    nobody is to wait for a connection that the first call makes."""

    def __init__(self, location: RedisLocation, num_lanes: int) -> None:
        self._lanes = [RedisLane(location) for _ in range(num_lanes)]
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
                    if isinstance(answer, Refused):
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
                    if isinstance(answer, Refused):
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
        super().__init__(location, 1)
        (self._exists,) = self._lanes

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        found: list[bool] = []
        with self._exists.call(timeout) as call:
            for at in range(0, len(names), _NAMES_IN_REQUEST):
                part = names[at : at + _NAMES_IN_REQUEST]
                found.extend(bool(_answer(one)) for one in call.ask([("EXISTS", str(name)) for name in part]))
        return found


def _answer(answer: Any) -> Any:
    if isinstance(answer, Refused):
        raise TierUnavailableError(f"Redis refuses to answer: {answer.text}")
    return answer


def _take(one: SlotObject, answer: Any) -> GetStatus:
    """Verify a value, and copy it into its slot."""
    from kvstow_service.tiers.objectheader import HEADER_BYTES, find_mismatch

    if isinstance(answer, Refused):
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
