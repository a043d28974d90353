"""One client of the store for everybody in the node service who needs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeVar

from kvstow.errors import TierUnavailableError
from kvstow.tier.objectname import ObjectName
from kvstow.tier.rate import TransferRate
from kvstow.tier.store import (
    ClientHealth,
    ClientStats,
    GetStatus,
    LookupClient,
    MemoryRange,
    PutStatus,
    SlotObject,
    TransferClient,
)

_S = TypeVar("_S")


class SharedTransfers:
    """The transfers of all ranks and pools of the node, through one client, and so one process. Thread-safe.

    One call of each kind at a time, as the client demands; the others wait for their turn. So a call's timeout follows
    from the rate that is measured here: a rank only sees how long it takes with all others.
    """

    def __init__(self, client: TransferClient) -> None:
        """Closes the client in `close`."""
        self.client = client
        self._turns = {"put": Lock(), "get": Lock()}
        self._rates = {"put": TransferRate(), "get": TransferRate()}

    def open(self) -> RankClient:
        """For one rank of one pool."""
        return RankClient(self)

    def close(self) -> None:
        """Everything under way has ended when this returns. Idempotent."""
        self.client.close()

    def move(self, kind: str, objects: Sequence[SlotObject], call: Callable[[float], list[_S]], good: str) -> list[_S]:
        """Make a call, with its timeout, when it is its turn."""
        num_bytes = sum(one.num_bytes for one in objects)
        rate = self._rates[kind]
        with self._turns[kind]:
            begun = time.monotonic()
            statuses = call(rate.timeout(num_bytes))
            if statuses.count(good) == len(statuses):  # type: ignore[arg-type]  # both are texts
                rate.observe(num_bytes, time.monotonic() - begun)
            return statuses


class RankClient:
    """The `TransferClient` of one rank of one pool: its memory, and its share of the node's client."""

    def __init__(self, shared: SharedTransfers) -> None:
        self._shared = shared
        self._is_closed = False
        self._busy = {"put": Lock(), "get": Lock()}

    def add_memory(self, memory: MemoryRange) -> None:
        self._shared.client.add_memory(memory)

    def remove_memory(self, memory: MemoryRange) -> None:
        self._shared.client.remove_memory(memory)

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        with self._busy["put"]:
            self._require_open()
            return self._shared.move("put", objects, lambda limit: self._shared.client.put(objects, limit), "stored")

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        with self._busy["get"]:
            self._require_open()
            return self._shared.move("get", objects, lambda limit: self._shared.client.get(objects, limit), "found")

    def health(self) -> ClientHealth:
        return ClientHealth("closed", "it was closed") if self._is_closed else self._shared.client.health()

    def stats(self) -> ClientStats:
        """Of the node's client."""
        return self._shared.client.stats()

    def close(self) -> None:
        self._is_closed = True
        for busy in self._busy.values():
            with busy:
                pass

    def _require_open(self) -> None:
        if self._is_closed:
            raise TierUnavailableError("the client was closed")


class SharedLookups:
    """A `LookupClient` of one namespace, over the one of the node, which stays open. `exists` is called by one thread
    at a time. Thread-safe."""

    def __init__(self, client: LookupClient, turn: Lock) -> None:
        """`turn`: the same for all that share the client."""
        self._client, self._turn = client, turn
        self._is_closed = False

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        with self._turn:
            if self._is_closed:
                raise TierUnavailableError("the client was closed")
            return self._client.exists(names, timeout)

    def health(self) -> ClientHealth:
        return self._client.health()

    def stats(self) -> ClientStats:
        return self._client.stats()

    def close(self) -> None:
        self._is_closed = True
