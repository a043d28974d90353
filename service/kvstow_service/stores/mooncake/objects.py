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

from kvstow.keys import GROUP_BYTES, BlockKey, group_of
from kvstow.tier.blockstore import PartState

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
    `add_memory` returns. `range_id` is used only once."""

    range_id: int
    num_bytes: int
    fd: int


class SlotObject(NamedTuple):
    """An object and its slot: `num_bytes` at `offset` of a memory range."""

    name: ObjectName
    range_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """The condition of a client. In the `state` `starting` it connects, for the first time or again. A client that has
    `failed` stays in that state until an operator acts. `reason` is a sentence, and empty while the client is `on`. The
    counters only grow. `restarts` counts how often its process was started again."""

    state: PartState
    reason: str = ""
    timeouts: int = 0
    restarts: int = 0


class TransferClient(Protocol):
    """Moves objects between the store and the memory of ranks."""

    def add_memory(self, memory: MemoryRange) -> None:
        """Take memory, whose slots may be lent from now on. It is kept across outages. The call may wait until a
        network card has registered it."""

    def remove_memory(self, range_id: int) -> None:
        """Give a range up, none of whose slots is lent. Returns when no process of the client maps it any more."""

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        """Copy slots into the store. An object that the store has already keeps its bytes."""

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        """Copy objects into slots, and verify them."""

    def health(self) -> ClientHealth: ...

    def close(self) -> None:
        """Give up calls under way, wait until no slot is touched any more, and free everything. Idempotent. Later calls
        raise `TierUnavailableError`."""


class LookupClient(Protocol):
    """Asks the store which objects it has."""

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        """Return for each object whether the store has it now."""

    def health(self) -> ClientHealth: ...

    def close(self) -> None:
        """Free everything. Idempotent. Later calls raise `TierUnavailableError`."""


class MooncakeClients(Protocol):
    """Opens clients, which connect in the background or with the first call, and again after an outage."""

    def open_transfers(self, witness: int) -> TransferClient:
        """Open a client for transfers. `witness`: see `BlockStore.start`."""

    def open_lookups(self) -> LookupClient: ...
