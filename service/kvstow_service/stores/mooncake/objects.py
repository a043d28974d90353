"""What the processes that run Mooncake's library are asked for: objects, each of one rank's block, and their slots.

Threads. `put` is called by one thread and `get` by another one, so there may be one call of each at the same time on
one client, and never two of one kind. All other calls may come from any thread at any time. `put`, `get` and `exists`
wait for the store.

Slots. The caller lends the slots of a `put` or `get` until the call returns or raises. When the call ends, in whatever
way, nothing touches the slots any more: no thread, no other process and no network card. A client that cannot make sure
of that does not return. So a call may last longer than its timeout.

Errors. What happens to one object is its status, in the order of the objects given. `TierUnavailableError` says that
the store answered nothing that can be used; some objects may have been moved all the same. A call that is not done when
its timeout has passed ends with `TierTimeoutError`. `InvalidRequestError` is a defect of the caller; nothing has been
touched then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvstow.errors import InvalidRequestError
from kvstow.keys import GROUP_BYTES, BlockKey, group_of

MAX_BATCH_OBJECTS = 64
"""Objects in one call of `put` or `get`. Larger batches have made a client of Mooncake hang."""
MAX_BATCH_BYTES = 128 << 20
"""Bytes in one call of `put` or `get`, unless a single object is larger."""


class ObjectName(NamedTuple):
    """One block of one rank. Equal names mean equal bytes, on every node. `fingerprint` covers all that the key does
    not. `rank` of `num_ranks`: a block that is the same on all ranks is one object, 0 of 1."""

    fingerprint: str
    key: BlockKey
    rank: int
    num_ranks: int

    def __str__(self) -> str:
        """The name in the store."""
        block_hash = self.key[GROUP_BYTES:].hex()
        return f"kvs1:{self.fingerprint}:{group_of(self.key)}:{block_hash}:{self.rank}of{self.num_ranks}"


PutStatus = Literal["stored", "full", "failed"]
"""`stored`: the object is there, also if it was before. `full`: the store has no room now; try again much later."""
GetStatus = Literal["found", "missing", "corrupt", "failed"]
"""`found`: the slot holds the bytes that were put under this very name, verified. Otherwise the slot's bytes mean
nothing. `corrupt`: what was found is not that, or has another length."""


class MemoryRange(NamedTuple):
    """Memory from which slots are lent: the memfd `fd`, which is the caller's, and open at least until `add_memory`
    returns. `address`: where it begins in a space of addresses in which ranges do not overlap."""

    address: int
    num_bytes: int
    fd: int


class SlotObject(NamedTuple):
    """An object and its slot: `num_bytes` at `address`, inside one memory range."""

    name: ObjectName
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """`state`: `connected`, `connecting` (not yet, or again), `failed` (until someone acts) or `closed`; `reason` is a
    sentence, empty while connected."""

    state: Literal["connected", "connecting", "failed", "closed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters since the client was opened; they only grow. `restarts`: how often its process was started again."""

    timeouts: int = 0
    restarts: int = 0


class TransferClient(Protocol):
    """Moves objects between the store and the memory of ranks."""

    def add_memory(self, memory: MemoryRange) -> None:
        """Slots in `memory`, which overlaps no other range, may be lent from now on. Kept across outages. May wait
        until a network card has registered it."""

    def remove_memory(self, memory: MemoryRange) -> None:
        """Slots in this range, none of which is lent, are not lent any more. Returns when nothing maps it."""

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        """Copy slots into the store. An object that is there already keeps its bytes."""

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        """Copy objects into slots, and verify them."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Give up what is under way, wait until nothing touches any slot, and give everything back. Idempotent. Later
        calls raise `TierUnavailableError`."""


class LookupClient(Protocol):
    """Asks about objects."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        """Which objects the store has now."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Give everything back. Idempotent. Later calls raise `TierUnavailableError`."""


class MooncakeClients(Protocol):
    """Opens clients, which connect in the background or with the first call, and again after an outage."""

    def open_transfers(self, witness: int) -> TransferClient:
        """`witness`: see `BlockStore.start`."""

    def open_lookups(self) -> LookupClient: ...


def check_batch(objects: Sequence[SlotObject], ranges: Sequence[MemoryRange]) -> None:
    """Raises `InvalidRequestError` unless each object lies inside one of the ranges, and the batch is not too large.

    Every client calls this before it touches anything: with TCP, Mooncake itself does not notice an address that was
    never registered."""
    if len(objects) > MAX_BATCH_OBJECTS:
        raise InvalidRequestError(f"a batch of {len(objects)} objects; allowed: {MAX_BATCH_OBJECTS}")
    total = sum(one.num_bytes for one in objects)
    if total > MAX_BATCH_BYTES and len(objects) > 1:
        raise InvalidRequestError(f"a batch of {total} bytes; allowed: {MAX_BATCH_BYTES}, or a single object")
    for one in objects:
        if one.num_bytes < 1:
            raise InvalidRequestError(f"object {one.name} has {one.num_bytes} bytes; allowed: 1 or more")
        if not any(
            memory.address <= one.address and one.address + one.num_bytes <= memory.address + memory.num_bytes
            for memory in ranges
        ):
            raise InvalidRequestError(
                f"object {one.name} is to use {one.num_bytes} bytes at {one.address:#x}; "
                f"allowed: addresses within one of the {len(ranges)} memory ranges that were added"
            )
