"""Ops in flight, and what follows when a rank finishes one.

An op is done when every rank has done it, and failed when one rank has failed. Either way it ends only when every rank
has finished, because until then some rank may still read or write its slots and blocks.

Completions are idempotent: one for an op that is not open, or from a rank that has finished it, is counted and changes
nothing. Op ids are never reused, so a late completion cannot meet a later op.

The other end of a `TierOp` is the store below the pool. A write holds its slots as a load does, and a read fills them
as a store does. A `TierOp` does not wait for ranks. The store gives its slots back in pieces, once no process touches
them any more, and says for each slot whether the bytes of all ranks have been moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import ERROR, WARNING

from kvstow.control.descriptions import StoreDescription
from kvstow.control.namespaces import Namespace
from kvstow.control.pool import Pool, PoolSession
from kvstow.messages import Completion, Direction, Mark, Op, TierDirection
from kvstow.results import Settled

OP_SLOTS = 16
"""Ending an op takes about as long as freeing this many slots, in addition to its own slots."""


@dataclass(frozen=True, slots=True)
class TierOp:
    """A transfer between slots and the store below the pool. No `Op` has the same id."""

    op_id: int
    direction: TierDirection
    slots: tuple[int, ...]


@dataclass(slots=True)
class OpenOp:
    """An op that some rank has not finished.

    `held`: slots that a load keeps from eviction. `pending`: ranks that have not finished. `reading`: ranks that may
    still read the blocks of a store. `abandoned`: a stuck store or read that the host no longer waits for; its slots
    are quarantined until it ends. `num_removed`: from how many slots of a failed load the blocks have been removed,
    beginning with the first one.
    """

    op: Op | TierOp
    namespace: Namespace
    held: tuple[int, ...]
    request_id: str
    started: float
    pending: set[int]
    reading: set[int] = field(default_factory=set)
    error: str | None = None
    abandoned: bool = False
    stuck: bool = False
    seconds: float = 0.0
    queue_seconds: float = 0.0
    num_removed: int = 0

    @property
    def fills_slots(self) -> bool:
        """Whether the op writes slots, whose keys are not visible meanwhile."""
        return self.op.direction in ("store", "read")

    @property
    def written(self) -> Sequence[int]:
        """The slots that the op may still write."""
        return self.op.slots if self.fills_slots else ()

    @property
    def kept(self) -> Sequence[int]:
        """The slots that the op keeps from eviction."""
        return self.held


@dataclass(slots=True, kw_only=True)
class OpenTierOp(OpenOp):
    """A transfer that has not ended. `left`: the slots that the store has not returned yet."""

    op: TierOp
    left: dict[int, None]

    @property
    def written(self) -> Sequence[int]:
        return tuple(self.left) if self.fills_slots else ()

    @property
    def kept(self) -> Sequence[int]:
        return () if self.fills_slots else tuple(self.left)


@dataclass(frozen=True, slots=True)
class EndedPart:
    """The result when some slots of a transfer have come back. `visible`: the slots of a read whose keys are visible
    now. `has_ended`: whether no slot of the transfer is left."""

    visible: Sequence[int]
    has_ended: bool


class OpsInFlight:
    """The open ops of a session of a pool, by id. Used with the lock of the pool held. A call is O(1), or O(slots of
    the op) if the op ends, unless a method says otherwise."""

    def __init__(self, pool: Pool, owner: PoolSession) -> None:
        self.pool, self._owner = pool, owner
        self._ranks = frozenset(range(pool.config.num_ranks))
        self._storing_ranks = frozenset(pool.config.storing_ranks)
        self._open: dict[int, OpenOp] = {}
        self._moving: dict[int, OpenOp] = {}
        """The ops that are not stuck. These and `_open` are in the order in which they started."""
        self._copies: dict[int, OpenOp] = {}
        """Loads and stores, in the order in which they started."""
        self.num_ops: dict[Direction, int] = {"store": 0, "load": 0}
        self.num_blocks: dict[Direction, int] = {"store": 0, "load": 0}
        self.held_slots = 0
        """How many slots loads keep from eviction. A slot counts once for each load."""
        self.num_stuck = 0
        """How many loads and stores are stuck. Transfers of the store below the pool do not count, because they stop
        neither loads nor stores."""
        self.stuck_tier_slots = 0
        """How many slots the stuck transfers of the store below the pool have had from the start."""
        self.num_abandoned = 0
        self.settled: deque[Settled] = deque()
        """Results that the host has not taken yet."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenOp]:
        """Oldest first. No op may start or end meanwhile."""
        return iter(self._open.values())

    def get(self, op_id: int) -> OpenOp | None:
        return self._open.get(op_id)

    def num_left(self, op_id: int) -> int:
        """Return how many slots of a transfer have not come back."""
        entry = self._open.get(op_id)
        return len(entry.left) if isinstance(entry, OpenTierOp) else 0

    def oldest_copy(self) -> OpenOp | None:
        """Return the oldest load or store, or None. Transfers of the store below the pool do not count, because they
        may be slow without stopping loads and stores."""
        return next(iter(self._copies.values()), None)

    def start(
        self,
        direction: Direction,
        blocks: tuple[int, ...],
        slots: tuple[int, ...],
        *,
        held: tuple[int, ...] = (),
        request_id: str,
        now: float,
    ) -> Op:
        """Start an op with a new id, which its ranks have to finish."""
        pool = self.pool
        pool.last_op_id += 1
        boots = self._owner.ranks.boots if self._owner.owns_memory else ()
        op = Op(pool.last_op_id, direction, blocks, slots, boots)
        if direction == "store":
            pending, reading = set(self._storing_ranks), set(self._storing_ranks)
        else:
            pending, reading = set(self._ranks), set[int]()
        entry = OpenOp(op, self._owner.namespace, held, request_id, now, pending, reading)
        self._open[op.op_id] = self._moving[op.op_id] = self._copies[op.op_id] = entry
        self.num_ops[direction] += 1
        self.num_blocks[direction] += len(blocks)
        self.held_slots += len(held)
        return op

    def start_tier(self, direction: TierDirection, namespace: Namespace, slots: Sequence[int], now: float) -> TierOp:
        """Start a transfer with a new id. The caller holds the slots of a write, and `end_part` ends these holds when
        the slots come back."""
        pool = self.pool
        pool.last_op_id += 1
        op = TierOp(pool.last_op_id, direction, tuple(slots))
        entry = OpenTierOp(
            op=op,
            namespace=namespace,
            held=(),
            request_id="",
            started=now,
            pending=set(),
            left=dict.fromkeys(slots),
        )
        self._open[op.op_id] = self._moving[op.op_id] = entry
        return op

    def end_part(self, op_id: int, good: Sequence[int], bad: Sequence[int]) -> EndedPart | None:
        """Take slots of a transfer that have come back. The keys of the `good` slots of a read become visible, as
        fetched blocks (`Pool.publish`). Returns None, and only counts the call, if the slots do not belong to an open
        transfer."""
        entry = self._open.get(op_id)
        slots = [*good, *bad]
        if not isinstance(entry, OpenTierOp) or any(slot not in entry.left for slot in slots):
            self.pool.counters.faults.stale_completions += 1
            return None
        pool = self.pool
        for slot in slots:
            del entry.left[slot]
        found: Sequence[int] = ()
        if not entry.fills_slots:
            pool.unhold(slots)
        elif entry.abandoned:
            pool.end_quarantine(slots)
        else:
            found = pool.publish(entry.namespace, sorted(good), fetched=True) if good else ()
            if bad:
                entry.namespace.pending_stores.abandon(bad)
                pool.deallocate(bad)
        if not entry.left:
            self._forget(entry)
        elif not entry.stuck:  # it makes progress, so its timeout begins anew
            entry.started = pool.clock()
            del self._moving[op_id]
            self._moving[op_id] = entry
        return EndedPart(found, not entry.left)

    # -- completion -----------------------------------------------------------------------------------------

    def complete(self, rank: int, completion: Completion) -> None:
        """Take a completion of `rank`, and end the op if it was the last one. Call `remove_unloadable` before this."""
        entry, faults = self._open.get(completion.op_id), self.pool.counters.faults
        if entry is None:
            faults.stale_completions += 1
        elif rank not in (entry.reading if completion.mark == "source_free" else entry.pending):
            faults.duplicate_completions += 1
        else:
            self._accept(entry, rank, completion)

    def remove_unloadable(self, rank: int, completion: Completion, most: int) -> int:
        """If this completion says that a load has failed, remove up to `most` of its blocks. Otherwise the request
        would find them again, and fail to load them again and again. Returns how many slots it has visited; call it
        until it returns 0."""
        entry = self._open.get(completion.op_id)
        if completion.mark != "failed" or entry is None or rank not in entry.pending or entry.op.direction != "load":
            return 0
        slots = entry.op.slots[entry.num_removed : entry.num_removed + most]
        if slots:
            entry.num_removed += len(slots)
            self.pool.remove_blocks(slots, "load_failed")
        return len(slots)

    def num_slots(self, op_id: int) -> int:
        """Return how many slots the end of this op frees or publishes at once. It is 0 for a load, whose slots are
        freed in slices."""
        entry = self._open.get(op_id)
        return len(entry.op.slots) if entry is not None and entry.fills_slots else 0

    def _accept(self, entry: OpenOp, rank: int, completion: Completion) -> None:
        was_reading = bool(entry.reading)
        entry.reading.discard(rank)
        if completion.mark != "source_free":
            entry.pending.discard(rank)
            entry.seconds = max(entry.seconds, completion.seconds)
            entry.queue_seconds = max(entry.queue_seconds, completion.queue_seconds)
        if completion.mark == "failed":
            entry.error = entry.error or f"rank {rank}: {completion.error or 'failed'}"
        if not entry.pending:
            self._end(entry)
        elif was_reading and not entry.reading and not entry.abandoned:
            self._settle(entry, "source_free")

    def _end(self, entry: OpenOp) -> None:
        pool, op = self.pool, entry.op
        described = self._forget(entry)
        assert isinstance(op, Op)
        if op.direction == "load":
            pool.end_holds([entry.held])
            if entry.error:
                pool.counters.lookups.miss_blocks["load_failed"] += len(op.slots)
                pool.counters.fallbacks["load_failed"] += 1
        else:
            self._end_store(entry, described)
        if entry.error:
            pool.counters.transfers.of(op.direction).error += 1
            pool.counters.faults.errors[f"{op.direction}_failed"] += 1
            pool.log(
                WARNING,
                "%s%s %d of %d blocks failed: %s",
                self._owner.label,
                op.direction,
                op.op_id,
                len(op.blocks),
                entry.error,
            )
        else:
            num_bytes = len(op.blocks) * pool.config.slot_bytes
            pool.counters.transfers.of(op.direction).count_success(
                len(op.blocks), num_bytes, entry.seconds, entry.queue_seconds
            )
        if not entry.abandoned:
            self._settle(entry, "failed" if entry.error else "done")
        if entry.stuck:
            self._owner.refresh_acceptance()

    def _forget(self, entry: OpenOp) -> StoreDescription:
        """Returns what is known of the blocks of a store."""
        op = entry.op
        del self._open[op.op_id]
        self._moving.pop(op.op_id, None)
        self.num_abandoned -= entry.abandoned
        if isinstance(op, Op):
            del self._copies[op.op_id]
            self.num_ops[op.direction] -= 1
            self.num_blocks[op.direction] -= len(op.blocks)
            self.num_stuck -= entry.stuck
            self.held_slots -= len(entry.held)
        elif entry.stuck:
            self.stuck_tier_slots -= len(op.slots)
        return self.pool.events.descriptions.end_store(op.op_id)

    def _end_store(self, entry: OpenOp, described: StoreDescription) -> None:
        pool, op = self.pool, entry.op
        outcomes = pool.counters.stores
        if entry.abandoned:
            pool.end_quarantine(op.slots)
        elif entry.error:
            entry.namespace.pending_stores.abandon(op.slots)
            pool.deallocate(op.slots)
            outcomes["failed"] += len(op.slots)
        else:
            stored = pool.publish(entry.namespace, op.slots, self._owner.on_stored, described=described)
            outcomes["stored"] += len(stored)
            outcomes["dropped_purged"] += len(op.slots) - len(stored)

    def _settle(self, entry: OpenOp, mark: Mark) -> None:
        op = entry.op
        assert isinstance(op, Op)
        self.settled.append(Settled(op.op_id, op.direction, mark, entry.request_id, op.blocks, entry.error))

    # -- ranks that restart or hang -------------------------------------------------------------------------

    def fail_rank(self, rank: int) -> Iterator[None]:
        """Fail the ops of a rank that has restarted. If its memory is lost, stores that it had finished fail, too, when
        the other ranks have ended them. The caller may release the lock between two steps."""
        pending = [(op_id, entry) for op_id, entry in self._open.items() if rank in entry.pending]
        owner = self._owner
        if owner.owns_memory:
            for entry in self._open.values():
                if entry.op.direction == "store":
                    entry.error = entry.error or f"rank {rank}: rank {rank} has restarted"
        loss = "its memory is lost, " if owner.owns_memory else ""
        self.pool.log(WARNING, "%srank %d has restarted: %s%d transfers fail", owner.label, rank, loss, len(pending))
        left = self.pool.slice_slots
        for op_id, entry in pending:
            if left <= 0:
                yield
                left = self.pool.slice_slots
            failed = Completion(op_id, "failed", f"rank {rank} has restarted")
            while owner.owns_memory and self.remove_unloadable(rank, failed, self.pool.slice_slots):
                pass
            if self._open.get(op_id) is entry and rank in entry.pending:
                left -= OP_SLOTS + self.num_slots(op_id)
                self._accept(entry, rank, failed)

    def dissolve(self) -> list[OpenOp]:
        """Forget some ops, the oldest first, and all results, because the session has ended. Stores fail, and their
        slots are quarantined, because the session's processes may still write them. Returns these ops; call it until no
        op is open."""
        pool, dissolved = self.pool, list[OpenOp]()
        left = most = pool.slice_slots
        for entry in list(islice(self._open.values(), max(1, most // OP_SLOTS))):
            if left <= 0:
                break
            dissolved.append(entry)
            op = entry.op
            left -= OP_SLOTS + (len(op.slots) if entry.fills_slots else 0)
            self._forget(entry)
            if isinstance(op, Op):
                pool.counters.transfers.of(op.direction).error += 1
                pool.counters.faults.errors[f"{op.direction}_failed"] += 1
                pool.counters.stores["failed"] += 0 if entry.abandoned or op.direction == "load" else len(op.slots)
            if entry.fills_slots and not entry.abandoned:
                pool.index.quarantine(entry.namespace, entry.written)
        self.settled.clear()
        return dissolved

    def mark_stuck(self, now: float) -> bool:
        """Mark the oldest op that has exceeded the transfer timeout as stuck. Returns False if there is none.

        A stuck store fails now, and its slots are quarantined, because the silent rank may still write them. The slots
        of a stuck read from the store below the pool are quarantined, too. A stuck load keeps waiting, because the rank
        may still write the host's blocks. So does a write to the store below the pool, because that store may still
        read the slots. Stuck transfers of that store do not stop loads and stores."""
        pool = self.pool
        entry = next(iter(self._moving.values()), None)
        if entry is None or entry.started >= now - pool.config.transfer_timeout:
            return False
        op = entry.op
        del self._moving[op.op_id]
        entry.stuck = True
        pool.counters.faults.errors["transfer_stuck"] += 1
        is_copy = isinstance(op, Op)
        self.num_stuck += is_copy
        reason = self.stuck_reason(entry, now)
        pool.log(
            ERROR,
            "%s%s %d is stuck after %g s: %s%s",
            self._owner.label,
            op.direction,
            op.op_id,
            pool.config.transfer_timeout,
            reason,
            "; loads and stores stop until it ends" if is_copy else "",
        )
        if entry.fills_slots:
            entry.abandoned = True
            self.num_abandoned += 1
            entry.error = entry.error or reason
            pool.index.quarantine(entry.namespace, entry.written)
            if is_copy:
                pool.counters.stores["failed"] += len(op.slots)
                self._settle(entry, "failed")
        if not is_copy:
            self.stuck_tier_slots += len(op.slots)
        return True

    def idle_ranks(self, entry: OpenOp, now: float) -> list[int]:
        """Return the ranks that have not completed the op and have nothing under way. The host has not submitted the op
        to them, or has not collected or passed on their completions."""
        return [rank for rank in sorted(entry.pending) if self._owner.ranks.idle_since(rank, entry.started, now)]

    def stuck_reason(self, entry: OpenOp, now: float) -> str:
        """Return what keeps the op from ending: ranks that work on it, the host, or the store below the pool."""
        if isinstance(entry, OpenTierOp):
            count = len(entry.left)
            return f"the store below the pool has not given back {count} slot{'' if count == 1 else 's'}"
        idle = self.idle_ranks(entry, now)
        busy = sorted(entry.pending.difference(idle))
        reasons = [f"{_named(busy, 'has', 'have')} not finished it"] if busy else []
        if idle:
            missed = self._owner.ranks.uncollected(idle)
            fault = f"not collected {missed} completions" if missed else "not submitted it, or lost its answer"
            reasons.append(f"the host has {fault}: {_named(idle, 'has', 'have')} nothing under way")
        return "; ".join(reasons)

    def is_consistent(self) -> bool:
        """Whether the list of ops that may become stuck has exactly the open ops that are not stuck. For integrity
        checks."""
        return self._moving.keys() == {op_id for op_id, entry in self._open.items() if not entry.stuck}


def _named(ranks: Sequence[int], one: str, several: str) -> str:
    """Return the ranks as the subject of a sentence, with the form of its verb."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks))} {several}"
