"""Puts and fetches: ops whose other end is the store of the fleet tier.

A put holds its slots as a load does. Rank 0 writes its object when all other ranks have ended their puts, so a look-up
that finds rank 0's object may expect the others. A fetch fills its slots as a store does: no key is visible before
every rank holds its bytes, and what a rank did not get is a miss on all of them, with all that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstow.control.openop import LAST_RANK, OpenOp, OpenTierOp
from kvstow.messages import Completion, TierCompletion, TierDirection, TierOp
from kvstow.results import TierSettled
from kvstow.stats import DirectionStats

if TYPE_CHECKING:
    from kvstow.control.ops import OpsInFlight


class TierLedger:
    """What `OpsInFlight` knows of puts and fetches beside what all ops have. Used with the lock of the pool held."""

    def __init__(self, ops: OpsInFlight) -> None:
        self._ops = ops
        self.plans: deque[tuple[int, TierOp]] = deque()
        """Ranks, each with an op that it has not been given yet."""
        self.settled: deque[TierSettled] = deque()
        """Results that the host has not taken."""
        self.stats: dict[TierDirection, DirectionStats] = {"put": DirectionStats(), "fetch": DirectionStats()}

    def begin(self, entry: OpenTierOp) -> None:
        """A transfer starts: plan it for its ranks. Rank 0 of a put waits for the others."""
        ranks = entry.pending - {LAST_RANK} if entry.waits_for_others else entry.pending
        self.plans.extend((rank, entry.tier_op) for rank in sorted(ranks))

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Those since the last call. A rank that has restarted since its op was planned does not get it: its slots hold
        other bytes now."""
        plans = [(rank, op) for rank, op in self.plans if self._is_pending(rank, op)]
        self.plans.clear()
        return plans

    def _is_pending(self, rank: int, op: TierOp) -> bool:
        entry = self._ops.get(op.op_id)
        return entry is not None and rank in entry.pending

    def accept(self, entry: OpenTierOp, completion: Completion) -> None:
        """Note that a rank has finished its part."""
        if isinstance(completion, TierCompletion):
            entry.moved = min(entry.moved, completion.moved)
            entry.failed = max(entry.failed, completion.failed)
            entry.full |= completion.full
            entry.outage |= completion.outage
        if entry.waits_for_others and entry.pending == {LAST_RANK}:
            self._go_on(entry)

    def _go_on(self, entry: OpenTierOp) -> None:
        """Give a put to rank 0, because all others have finished it."""
        entry.waits_for_others = False
        if entry.error or not entry.moved:
            entry.pending.clear()
            return
        op, moved = entry.tier_op, entry.moved
        self.plans.append((LAST_RANK, replace(op, keys=op.keys[:moved], slots=op.slots[:moved])))

    def end(self, entry: OpenTierOp) -> None:
        """Settle an op that all ranks have finished."""
        pool, op = self._ops.pool, entry.tier_op
        moved = 0 if entry.error else entry.moved
        if op.direction == "put":
            pool.unhold(entry.held)
        elif entry.abandoned:
            pool.index.end_quarantine(op.slots)
            pool.deallocate(op.slots)
        else:
            self._fill(entry, op.keys, op.slots, moved)
        stats = self.stats[op.direction]
        if entry.error:
            stats.error += 1
        else:
            stats.count_success(moved, moved * pool.config.slot_bytes, entry.seconds, entry.queue_seconds)
        if not entry.abandoned:
            self.settle(entry, moved)

    def _fill(self, entry: OpenOp, keys: Sequence[bytes], slots: Sequence[int], moved: int) -> None:
        """The leading slots of a fetch are valid on all ranks; the others are not."""
        pool = self._ops.pool
        if moved:
            self._ops.publish(entry.namespace, keys[:moved], slots[:moved])
        if moved < len(slots):
            entry.namespace.pending_stores.finish(keys[moved:], slots[moved:])
            pool.deallocate(slots[moved:])

    def settle(self, entry: OpenTierOp, moved: int) -> None:
        op = entry.tier_op
        self.settled.append(
            TierSettled(
                op_id=op.op_id,
                direction=op.direction,
                keys=op.keys,
                moved=moved,
                seconds=entry.seconds,
                failed=entry.failed,
                full=entry.full,
                outage=entry.outage,
                error=entry.error,
            )
        )

    def dissolve(self) -> None:
        """The session has ended."""
        self.plans.clear()
        self.settled.clear()
