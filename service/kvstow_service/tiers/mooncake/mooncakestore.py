"""Mooncake Store as the store of a tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec

from kvstow.errors import MissingPackageError
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
from kvstow_service.tiers.mooncake.childchannel import CONTROL, ChildChannel
from kvstow_service.tiers.mooncake.childmessages import Connect, Exists, Get, Put, SlotPart
from kvstow_service.tiers.mooncake.childprocess import ChildProcess
from kvstow_service.tiers.mooncake.location import MooncakeLocation
from kvstow_service.tiers.mooncake.statuscodes import INVALID_PARAMS, get_status, put_status, require_master

_NAMES_IN_MESSAGE = 500  # of 250 bytes at most
_PUTS, _GETS, _EXISTS = "puts", "gets", "exists"

_log = logging.getLogger(__name__)


class MooncakeStore:
    """See `kvstow.tier.store.TierStore`. Each client has a process of its own."""

    name = "mooncake"

    def __init__(self, location: MooncakeLocation) -> None:
        """Raises `MissingPackageError`."""
        for package in ("mooncake", "xxhash"):
            if find_spec(package) is None:
                raise MissingPackageError("a tier in Mooncake", package, "mooncake")
        self._location = location

    def open_transfers(self, rank: int, witness: int | None = None) -> MooncakeTransfers:
        return MooncakeTransfers(self._channel(f"transfers of rank {rank}", _PUTS, _GETS, witness=witness))

    def open_lookups(self) -> MooncakeLookups:
        return MooncakeLookups(self._channel("look-ups", _EXISTS))

    def _channel(self, purpose: str, *lanes: str, witness: int | None = None) -> ChildChannel:
        inherited = () if witness is None else (witness,)
        return ChildChannel(purpose, lambda: ChildProcess((CONTROL, *lanes), inherited), self._connect_message)

    def _connect_message(self) -> Connect:
        where = self._location
        return Connect(where.local_host(), where.master, where.protocol, where.devices, where.replicas)


class _Client:
    def __init__(self, channel: ChildChannel) -> None:
        self.channel = channel

    def health(self) -> ClientHealth:
        return self.channel.health()

    def stats(self) -> ClientStats:
        return self.channel.stats()

    def close(self) -> None:
        self.channel.close()


class MooncakeTransfers(_Client):
    """See `kvstow.tier.store.TransferClient`. Its process maps the memory of the rank."""

    def add_memory(self, memory: MemoryRange) -> None:
        self.channel.add_memory(memory)

    def remove_memory(self, memory: MemoryRange) -> None:
        self.channel.remove_memory(memory)

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        codes = self._move(_PUTS, Put(self._parts(objects)), timeout)
        statuses = [put_status(code) for code in codes]
        self.channel.count(**count_puts(objects, statuses))
        return statuses

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        codes = self._move(_GETS, Get(self._parts(objects)), timeout)
        statuses = [get_status(code) for code in codes]
        self.channel.count(**count_gets(objects, statuses))
        return statuses

    def _move(self, lane: str, request: Put | Get, timeout: float) -> tuple[int, ...]:
        if not request.objects:
            return ()
        codes = self.channel.call(lane, request, timeout)
        require_master(codes)
        if INVALID_PARAMS in codes:
            _log.error("Mooncake calls %d of %d %s invalid", codes.count(INVALID_PARAMS), len(codes), lane)
        return codes

    def _parts(self, objects: Sequence[SlotObject]) -> tuple[SlotPart, ...]:
        check_batch(objects, self.channel.ranges())
        return tuple(
            SlotPart(one.name.fingerprint, str(one.name), *self.channel.locate(one.address), one.num_bytes)
            for one in objects
        )


class MooncakeLookups(_Client):
    """See `kvstow.tier.store.LookupClient`."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        end, found = time.monotonic() + timeout, list[bool]()
        for part in _parts(names):
            codes = self.channel.call(_EXISTS, Exists(part), end - time.monotonic())
            require_master(codes)
            found.extend(code == 1 for code in codes)
        return found


def _parts(names: Sequence[ObjectName]) -> list[tuple[str, ...]]:
    """What fits into one message each."""
    texts = [str(name) for name in names]
    return [tuple(texts[at : at + _NAMES_IN_MESSAGE]) for at in range(0, len(texts), _NAMES_IN_MESSAGE)]
