"""The ledger: ops in flight, and which ranks still owe a word on each.

An op is done when every rank said so, failed when one did; either way it settles only when every rank has
spoken, because until then some rank may still read or write its slots and blocks. What ranks say is
idempotent: a word on an op that is not open, or that the rank has given already, is counted and not believed.
Op ids are never reused, so a late word can never meet a later op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvstow.messages import Completion, Direction, Op


class Verdict(Enum):
    """What a completion changed."""

    STALE = "stale"
    DUPLICATE = "duplicate"
    PROGRESS = "progress"
    SOURCE_FREE = "source_free"
    SETTLED = "settled"


@dataclass(slots=True)
class OpenOp:
    """An op that some rank still owes a word on.

    `held`: slots that a load keeps from eviction. `given_up`: a store that was stuck; its slots are
    quarantined until it settles.
    """

    op: Op
    keys: tuple[bytes, ...]
    held: tuple[int, ...]
    request_id: str
    started: float
    pending: set[int]
    reading: set[int] = field(default_factory=set)
    error: str | None = None
    given_up: bool = False
    stuck: bool = False
    seconds: float = 0.0
    queue_seconds: float = 0.0


class Ledger:
    """Open ops by id. Not locked; each call is O(1) but for those that say otherwise."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = frozenset(range(num_ranks))
        self._open: dict[int, OpenOp] = {}
        self._moving: dict[int, OpenOp] = {}
        """Those that are not stuck. Like `_open`, in order of their start."""
        self._last_op_id = 0
        self.ops = {"store": 0, "load": 0}
        self.blocks = {"store": 0, "load": 0}
        self.num_stuck = 0
        self.num_given_up = 0
        self.stale = 0
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        direction: Direction,
        blocks: tuple[int, ...],
        slots: tuple[int, ...],
        *,
        keys: tuple[bytes, ...],
        held: tuple[int, ...],
        request_id: str,
        now: float,
    ) -> Op:
        """Enter an op with a new id, owed by every rank."""
        self._last_op_id += 1
        op = Op(self._last_op_id, direction, blocks, slots)
        reading = set(self._ranks) if direction == "store" else set()
        entry = OpenOp(op, keys, held, request_id, now, set(self._ranks), reading)
        self._open[op.op_id] = self._moving[op.op_id] = entry
        self.ops[direction] += 1
        self.blocks[direction] += len(blocks)
        return op

    def get(self, op_id: int) -> OpenOp | None:
        return self._open.get(op_id)

    def record(self, rank: int, completion: Completion) -> Verdict:
        """Take `rank`'s word. On SETTLED the op is still there: the caller takes it out with `close`."""
        entry = self._open.get(completion.op_id)
        if entry is None:
            self.stale += 1
            return Verdict.STALE
        if completion.mark == "source_free":
            if rank not in entry.reading:
                self.duplicates += 1
                return Verdict.DUPLICATE
            entry.reading.discard(rank)
            return Verdict.PROGRESS if entry.reading else Verdict.SOURCE_FREE
        if rank not in entry.pending:
            self.duplicates += 1
            return Verdict.DUPLICATE
        was_reading = bool(entry.reading)
        entry.pending.discard(rank)
        entry.reading.discard(rank)
        if completion.mark == "failed":
            entry.error = entry.error or f"rank {rank}: {completion.error or 'failed'}"
        entry.seconds = max(entry.seconds, completion.seconds)
        entry.queue_seconds = max(entry.queue_seconds, completion.queue_seconds)
        if not entry.pending:
            return Verdict.SETTLED
        return Verdict.SOURCE_FREE if was_reading and not entry.reading else Verdict.PROGRESS

    def close(self, op_id: int) -> OpenOp:
        """Take a settled op out."""
        entry = self._open.pop(op_id)
        self._moving.pop(op_id, None)
        self.ops[entry.op.direction] -= 1
        self.blocks[entry.op.direction] -= len(entry.op.blocks)
        self.num_stuck -= entry.stuck
        self.num_given_up -= entry.given_up
        return entry

    def give_up(self, entry: OpenOp) -> None:
        """Nobody waits for this open op any more."""
        entry.given_up = True
        self.num_given_up += 1

    def owed_by(self, rank: int) -> list[int]:
        """Ids of the ops that `rank` owes a word on, oldest first. O(open ops)."""
        return [op_id for op_id, entry in self._open.items() if rank in entry.pending]

    def oldest(self) -> OpenOp | None:
        return next(iter(self._open.values()), None)

    def __iter__(self) -> Iterator[OpenOp]:
        """Open ops, oldest first. The ledger must not change meanwhile."""
        return iter(self._open.values())

    def balances(self) -> bool:
        """Whether exactly the ops that are not stuck may become so. For integrity checks."""
        return self._moving.keys() == {op_id for op_id, entry in self._open.items() if not entry.stuck}

    def mark_stuck(self, started_before: float) -> OpenOp | None:
        """The oldest op that has become stuck: started before then, and not marked yet; None if there is none."""
        entry = next(iter(self._moving.values()), None)
        if entry is None or entry.started >= started_before:
            return None
        del self._moving[entry.op.op_id]
        entry.stuck = True
        self.num_stuck += 1
        return entry
