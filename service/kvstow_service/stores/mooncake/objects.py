"""The protocols of Mooncake's clients. An object is one rank's part of a block, and moves to or from a slot.

Threads. One thread calls `put` and another one calls `get`. So there may be one call of each kind at the same time on a
client, but never two of the same kind. All other calls may come from any thread at any time. `put`, `get` and `exists`
wait for the store.

Slots. The caller lends the slots of a `put` or `get` until the call returns or raises. When the call ends, in whatever
way, no thread, no other process and no network card touches the slots any more. A client that cannot ensure this does
not return. So a call may last longer than its timeout.

Errors. A call returns a status for each object, in the order given. `TierUnavailableError` means that the store gave no
usable answer; some objects may have been moved all the same. A call that is not done when its timeout has passed ends
with `TierTimeoutError`. `InvalidRequestError` is a defect of the caller; the call has touched no slot then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvstow.errors import InvalidRequestError
from kvstow.keys import GROUP_BYTES, BlockKey, group_of

MAX_BATCH_OBJECTS = 64
"""How many objects one call of `put` or `get` may have. Larger batches have made a client of Mooncake hang."""
MAX_BATCH_BYTES = 128 << 20
"""How many bytes one call of `put` or `get` may move, unless a single object is larger."""


class ObjectName(NamedTuple):
    """One block of one rank. Equal names mean equal bytes, on every node. `fingerprint` covers everything that the key
    does not. `rank`: the rank among `num_ranks`. A block that is the same on all ranks is one object, of rank 0 of
    1."""

    fingerprint: str
    key: BlockKey
    rank: int
    num_ranks: int

    def __str__(self) -> str:
        """Return the name in the store."""
        block_hash = self.key[GROUP_BYTES:].hex()
        return f"kvs1:{self.fingerprint}:{group_of(self.key)}:{block_hash}:{self.rank}of{self.num_ranks}"


PutStatus = Literal["stored", "full", "failed"]
"""`stored`: the object is in the store, perhaps since before. `full`: the store has no room now; try again much
later."""
GetStatus = Literal["found", "missing", "corrupt", "failed"]
"""`found`: the slot holds the bytes that were put under this very name, and they were verified. With any other status,
the slot's bytes mean nothing. `corrupt`: the bytes that were found are others, or have another length."""


class MemoryRange(NamedTuple):
    """Memory from which slots are lent: the memfd `fd`, which the caller owns and keeps open at least until
    `add_memory` returns. `address`: the begin of the range in a space of addresses in which ranges do not overlap."""

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
    """`state`: `connected`, `connecting` (for the first time or again), `failed` (until an operator acts) or `closed`.
    `reason`: a sentence, empty while connected."""

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
        """Take memory, which overlaps no other range and whose slots may be lent from now on. It is kept across
        outages. The call may wait until a network card has registered it."""

    def remove_memory(self, memory: MemoryRange) -> None:
        """Give a range up, none of whose slots is lent. Returns when no process of the client maps it any more."""

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        """Copy slots into the store. An object that the store has already keeps its bytes."""

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        """Copy objects into slots, and verify them."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Give up calls under way, wait until no slot is touched any more, and free everything. Idempotent. Later calls
        raise `TierUnavailableError`."""


class LookupClient(Protocol):
    """Asks the store which objects it has."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        """Return for each object whether the store has it now."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Free everything. Idempotent. Later calls raise `TierUnavailableError`."""


class MooncakeClients(Protocol):
    """Opens clients, which connect in the background or with the first call, and again after an outage."""

    def open_transfers(self, witness: int) -> TransferClient:
        """Open a client for transfers. `witness`: see `BlockStore.start`."""

    def open_lookups(self) -> LookupClient: ...


def check_batch(objects: Sequence[SlotObject], ranges: Sequence[MemoryRange]) -> None:
    """Raise `InvalidRequestError` unless each object lies inside one of the ranges, and the batch is not too large.

    Every client calls this before it touches memory, because with TCP, Mooncake itself does not notice an address that
    was never registered."""
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
