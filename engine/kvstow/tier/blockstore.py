"""The protocol of a store below the pools of a node: files on the node's own disks, or a store that a fleet shares.

A node has at most one `BlockStore`. Each pool that uses it joins it, and gets a `StoredPool`. `kvstow.control` decides
what is read and written, takes the slots, and makes keys visible. The store knows names of blocks and numbers of slots.

Waiting. No call waits for a disk, a network or another process, except `BlockStore.close`. Each is O(blocks or slots
given). Every call may come from any thread. What a call cannot answer at once comes later through a callback. A store
makes callbacks on threads of its own, never inside of a call, and holds no lock meanwhile: a callback may take the
pool's lock and call the store again.

Slots. The caller lends the slots of a transfer to the store, which gives each of them back exactly once, in some
`Piece`. Until then the store's processes may read the slots of a write and write those of a read; from then on nothing
touches them any more, no thread, no process and no network card. A store that cannot make sure of that keeps the slot.
So a slot may come back late, or never while a process hangs in the kernel. The caller waits for nothing: it keeps such
slots from all other uses. If a path or a process of the store hangs, only the slots that were lent to it are kept, and
only the blocks that it had are missing; everything else goes on.

Order. Queued reads go before queued writes.

Names. A block is known by the fingerprint of its namespace and by its key: blocks with equal names have equal bytes, on
every node and in every life of the service. A fingerprint (see `kvstow.tier.fingerprint`) covers everything that the
key does not: the model, its weights and settings, the layout of a slot on all ranks, and the tenant. All ranks' bytes
of a block are one block. It is found only if every rank's bytes are there, and they are what was written under this
very name: a store verifies that before it gives a slot back as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class StoredLayout(NamedTuple):
    """The pool that joins. `slot_bytes`: the size of a slot on each rank that stores, in the order of the ranks; a
    single size if all ranks have the same bytes. `identity`: is equal for pools of equal layout and owner, also in
    another life of the service. A purge of the whole pool removes all namespaces that were written by pools with this
    identity. `owner`: the owner whose share of space, queues and write budget the pool uses."""

    pool: str
    slot_bytes: tuple[int, ...]
    identity: str
    owner: str


class StoredExtent(NamedTuple):
    """Memory of a pool's rank: a populated memfd of `num_bytes`. Slot `first_slot` + i begins at i x `slot_stride`."""

    extent_id: int
    first_slot: int
    num_slots: int
    slot_stride: int
    num_bytes: int


class BlockTransfer(NamedTuple):
    """A transfer of some blocks, in prefix order, root first: block `keys[i]` and slot `slots[i]` of every rank.
    `op_id` is never used again in the life of the service."""

    op_id: int
    fingerprint: str
    keys: Sequence[bytes]
    slots: Sequence[int]


class Piece(NamedTuple):
    """A part of a transfer that has ended, with the slots that come back. `good`: slots whose blocks were read and
    verified, or were written and are found from now on. `bad`: slots whose blocks were not moved; after a read, they
    hold any bytes. Why a block was not moved makes no difference for the caller; the counters of parts show it."""

    op_id: int
    good: Sequence[int]
    bad: Sequence[int] = ()


class Expectation(NamedTuple):
    """How long a read that begins now would take. `seconds`: the time until its last block is there, including
    everything that is queued before it; None while the store has not measured its rate. `queued_bytes` and
    `queued_seconds`: the transfers that are queued before it, in both directions as far as they delay a read."""

    seconds: float | None
    queued_bytes: int
    queued_seconds: float


@dataclass(frozen=True, slots=True)
class PurgeWish:
    """Which blocks a purge removes. At most one of the first three is given. `keys`: the blocks with these keys, in all
    of the pool's namespaces. `key_prefixes`: the blocks whose keys begin with one of these. `fingerprint`: all blocks
    of this namespace. If none of the three is given, all blocks that pools with this identity have ever written. The
    ages, in seconds, restrict the choice to blocks that were written, or last used, at least this long ago."""

    keys: Sequence[bytes] | None = None
    key_prefixes: tuple[bytes, ...] | None = None
    fingerprint: str | None = None
    age_seconds: float | None = None
    idle_seconds: float | None = None


class Purged(NamedTuple):
    """The result of a purge. `blocks`: how many blocks were removed or, in a dry run, would be. `notice`: a sentence
    about blocks that may be left, for example because the store only has digests of their keys and cannot know whether
    they match; empty if there are none."""

    blocks: int
    notice: str = ""


PartState = Literal["starting", "on", "in use", "failed", "stuck", "closed"]
"""A part that is `starting` is not usable yet, or connects again. A part that is `in use` belongs to another process,
and is tried again. A part that has `failed` is tried again as its reason says. If a part is `stuck`, an operation
hangs, and the slots that it was lent cannot be used."""


@dataclass(slots=True)
class PartCounters:
    """What a part has counted. The figures only grow; bytes are of all ranks. A `StorePart` has a copy of its own."""

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    corrupt_blocks: int = 0
    failed_blocks: int = 0
    refused_blocks: int = 0
    evicted_blocks: int = 0
    restarts: int = 0
    """How often a process was ended and started again."""
    timeouts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePart:
    """A part of a store that can fail alone: a path of disks, or a process that is a client of a fleet's store.

    `name`: for example the path. `reason`: a sentence, empty while the part is `on`. Figures that a part does not have,
    or has not measured, are None. `size_bytes`: the size of all its places. `used_bytes`: the size of the places that
    hold a block. `drive_writes_per_day`: how much was written in the last day, in capacities of the file system.
    `stuck_slots`: how many slots it keeps for operations that are overdue."""

    name: str
    state: PartState
    reason: str = ""
    counters: PartCounters
    blocks: int | None = None
    size_bytes: int | None = None
    used_bytes: int | None = None
    queued_read_bytes: int = 0
    queued_write_bytes: int = 0
    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None
    written_bytes_today: int | None = None
    write_budget_bytes: int | None = None
    drive_writes_per_day: float | None = None
    stuck_slots: int = 0


class StoredPool(Protocol):
    """A store as one pool uses it."""

    # -- what the store has -----------------------------------------------------------------------------------

    def has(
        self, fingerprint: str, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool] | None:
        """Return for each key whether a read would find it. This is a hint, because the block may be gone by then.
        Returns None if this is not known yet. Then `on_answer` is called once with the answer; if the other side does
        not answer, no key counts as found. A store that cannot be used now answers at once that it has none of the
        keys. The call does not count as a use. If the store `answers_at_once`, callers ask for a part of a long chain
        at a time."""

    def offer(self, fingerprint: str, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        """Note that a request uses these blocks (`is_use`), or has just stored them in its pool. They are a chain or a
        part of one, root first. To store a block does not count as a use, because the request's chain is offered as
        used, too. Returns the indices of the blocks that the store wants to be written now: it neither has them nor is
        writing them, and has room and budget for them. The caller writes the blocks that are in the pool and leaves out
        the others. The call reserves nothing.

        A store whose budget is short wants only blocks of which it remembers an earlier use."""

    def expect(self, num_blocks: int) -> Expectation:
        """Return how long it would take to read `num_blocks` more blocks. O(1)."""

    # -- transfers --------------------------------------------------------------------------------------------

    def read(self, transfer: BlockTransfer) -> None:
        """Fill the slots with these blocks. Pieces of the transfer end as the blocks arrive, mostly root first."""

    def write(self, transfer: BlockTransfer) -> None:
        """Write these blocks from their slots. A block that the store has already counts as good. Blocks that it cannot
        take now come back as bad."""

    def cancel(self, op_id: int) -> None:
        """End the part of a transfer that has not begun. Ignores a transfer that has ended."""

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        """Remove blocks. From the moment of the call, they are not found, and blocks that are being written will not be
        found either. `then` is called when no failure of the node can bring one of them back. Their bytes are
        overwritten after that; if the store ends before, its next life continues."""

    # -- memory -----------------------------------------------------------------------------------------------

    def add_extent(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None:
        """Take an extent. Its slots may be lent once `then` was called with an empty text. Otherwise the text is a
        sentence that says why the extent cannot be used. `rank`: an index into `slot_bytes`. The caller keeps `fd`,
        which must stay open until this returns. The store keeps the extent when its processes end and start again."""

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        """Give an extent up. `then` is called when no process of the store has the extent mapped any more, which may be
        never while a process hangs. The caller has lent none of its slots, except slots that a hanging operation keeps.
        If the extent was not added, this only calls `then`."""

    def leave(self, then: Callable[[], object]) -> None:
        """Leave the store, because the pool ends. The slots of transfers that have not begun come back as bad, and
        those of further transfers do so at once. `then` is called when every slot was given back and no process of the
        store has memory of the pool mapped. The pool's blocks stay in the store. Idempotent: only the first `then` is
        called."""


class BlockStore(Protocol):
    """The store of a node. It opens nothing and connects to nothing before `start`, and `start` does so in the
    background: the node is ready without it."""

    @property
    def name(self) -> str:
        """The label of metrics: `disk` or `mooncake`."""

    @property
    def slot_alignment(self) -> int:
        """Slots can be lent only if they begin at multiples of this many bytes; 1 if any address will do. A read may
        fill a slot up to the next multiple."""

    @property
    def answers_at_once(self) -> bool:
        """Whether `StoredPool.has` never returns None."""

    @property
    def shown(self) -> str:
        """The place of the store, as every reader of the admin API may see it: a URL without secrets, or paths."""

    def start(self, witness: int) -> None:
        """Start the store in the background. `witness`: the writing end of a pipe, which the caller still owns. Each
        process of the store that may touch memory inherits it before it gets any, so the other end shows when the last
        of them has ended, even if this process ends first."""

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> StoredPool:
        """Let a pool use the store. `on_end` is called with the pieces of its transfers."""

    def parts(self) -> Sequence[StorePart]:
        """Return a snapshot for operators. It is never empty after `start`."""

    def close(self) -> None:
        """Give up transfers that are under way, and end the processes. Waits for them for a bounded time; a process
        that hangs in the kernel is left behind, with its slots and the witness. Idempotent. Later calls do nothing, and
        the slots of later transfers come back as bad."""
