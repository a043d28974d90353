"""The protocol of a tier's store: what the engine asks of it, on which thread, and who owns a slot meanwhile.

A `TierStore` names the store. A host opens a `TransferClient` for the slots of all its ranks, and a `LookupClient`.
They share nothing: whatever happens to one of them, the slots of the other are not touched.

Threads. `put` is called by one thread and `get` by another one, so there may be one call of each at the same time on
one client, and never two of one kind. All other calls may come from any thread at any time. `put`, `get` and `exists`
wait for the store; no call is made by the thread of a scheduler or of an event loop, except `stats`, which never waits.

Slots. The caller lends the slots of a `put` or `get` to the client until the call returns or raises. The client reads
the slots of a `put` and writes those of a `get`, and touches no other memory. When the call ends, in whatever way,
nothing may touch the slots any more: no thread, no other process and no network card. A client that cannot make sure
of that does not return. So a call may last longer than its timeout, and the engine keeps the slots from other uses
until it ends.

Timeouts are in seconds. A call that is not done when its timeout has passed is given up: the client first makes sure
that nothing touches the slots, if need be by ending the process that might, and then raises `TierTimeoutError`.

Errors. What happens to one object is its status, in the order of the objects given. `TierUnavailableError` says that
the store answered nothing that can be used; some objects may have been moved all the same. `InvalidRequestError` is a
defect of the caller; nothing has been touched then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvstow.errors import InvalidRequestError
from kvstow.keys import GROUP_BYTES, BlockKey, group_of


class ObjectName(NamedTuple):
    """One block of one rank. Equal names mean equal bytes, on every node.

    `fingerprint` covers all that the key does not: the weights, what changes KV values, the layout of a slot and the
    number of ranks. `rank` of `num_ranks`: a block that is the same on all ranks is one object, 0 of 1.
    """

    fingerprint: str
    key: BlockKey
    rank: int
    num_ranks: int

    def __str__(self) -> str:
        """The name in the store."""
        block_hash = self.key[GROUP_BYTES:].hex()
        return f"kvs1:{self.fingerprint}:{group_of(self.key)}:{block_hash}:{self.rank}of{self.num_ranks}"


MAX_BATCH_OBJECTS = 64
"""Objects in one call of `put` or `get`. Larger batches have made a client of Mooncake hang."""
MAX_BATCH_BYTES = 128 << 20
"""Bytes in one call of `put` or `get`, unless a single object is larger."""

PutStatus = Literal["stored", "full", "failed"]
"""`stored`: the object is there, also if it was before. `full`: the store has no room now; try again much later."""
GetStatus = Literal["found", "missing", "corrupt", "failed"]
"""`found`: the slot holds the bytes that were put under this very name, verified. Otherwise the slot's bytes mean
nothing. `corrupt`: what was found is not that, or has another length."""


class MemoryRange(NamedTuple):
    """Memory of a rank, from which slots are lent. `address` is in the process that opened the client. If `fd` is not
    None, it is a memfd whose bytes from `offset` on are those at `address`, so that another process can map them; it is
    the caller's, and open at least until `add_memory` returns."""

    address: int
    num_bytes: int
    fd: int | None = None
    offset: int = 0


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
    """Counters since the client was opened; they only grow. A client knows the last two, and `StoreTransfers` the
    others. `restarts`: how often what connects to the store was ended and started again."""

    put_objects: int = 0
    put_bytes: int = 0
    get_objects: int = 0
    get_bytes: int = 0
    corrupt_objects: int = 0
    timeouts: int = 0
    restarts: int = 0


class TransferClient(Protocol):
    """Moves objects between the store and the memory of ranks."""

    def add_memory(self, memory: MemoryRange) -> None:
        """Slots in `memory`, which overlaps no other range, may be lent from now on, as soon as they are populated.
        Does not wait for the store, and is kept across its outages."""

    def remove_memory(self, memory: MemoryRange) -> None:
        """Slots in this range, none of which is lent, are not lent any more. Returns when nothing maps it."""

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        """Copy slots into the store. An object that is there already keeps its bytes. See the module for slots and
        errors."""

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        """Copy objects into slots, and verify them. See the module for slots and errors."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Give up what is under way, wait until nothing touches any slot, and give everything back. Idempotent. Later
        calls raise `TierUnavailableError`."""


class LookupClient(Protocol):
    """Asks about objects. Has no memory of any rank."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        """Which objects the store has now. A hint: it may be gone when it is fetched."""

    def health(self) -> ClientHealth: ...

    def stats(self) -> ClientStats: ...

    def close(self) -> None:
        """Give everything back. Idempotent. Later calls raise `TierUnavailableError`."""


class TierStore(Protocol):
    """A store that nodes share. Opening a client waits for nothing: it connects in the background or with the first
    call, and connects again after an outage. `name` labels metrics, such as `mooncake`."""

    @property
    def name(self) -> str: ...

    def open_transfers(self, witness: int | None = None) -> TransferClient:
        """`witness`: a descriptor, such as one end of a pipe, that stays the caller's. Each process of the client that
        may touch memory inherits it before it gets any, so the other end shows when the last of them has ended, even
        if this process ends first."""

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
