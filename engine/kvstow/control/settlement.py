"""Settlement: what follows from a rank's word on an op. The caller holds the lock of the state."""

from __future__ import annotations

from logging import ERROR, WARNING

from kvstow.control.ledger import OpenOp, Verdict
from kvstow.control.state import ControlState, Settled
from kvstow.messages import Completion, Mark


def record(state: ControlState, rank: int, completion: Completion) -> None:
    """Take a rank's word, and settle the op if it was the last one owed."""
    verdict = state.ledger.record(rank, completion)
    if verdict in (Verdict.STALE, Verdict.DUPLICATE):
        return
    entry = state.ledger.get(completion.op_id)
    assert entry is not None  # only a stale completion has no entry
    if completion.mark == "failed" and entry.op.direction == "load":
        # At the first rank's word: the request must not find these keys again and load in a circle.
        state.remove(entry.op.slots, "load_failed")
    if verdict is Verdict.SETTLED:
        _settle(state, state.ledger.close(completion.op_id))
    elif verdict is Verdict.SOURCE_FREE and not entry.given_up:
        _tell(state, entry, "source_free")


def fail_rank(state: ControlState, rank: int) -> None:
    """A rank has started anew: all contents are lost, and its ops fail."""
    state.counters.rank_restarts += 1
    state.counters.errors["rank_restarted"] += 1
    state.lose(0)
    owed = state.ledger.owed_by(rank)
    state.log(WARNING, "rank %d has started anew: its memory is lost, %d transfers fail", rank, len(owed))
    for op_id in owed:
        record(state, rank, Completion(op_id, "failed", f"rank {rank} has started anew"))


def give_up(state: ControlState, entry: OpenOp, now: float) -> None:
    """A transfer is stuck. A store fails now: what the silent rank may still read of its blocks goes into slots
    in quarantine. A load goes on waiting, because that rank may still write its blocks."""
    op, reason = entry.op, stuck_reason(state, entry, now)
    state.counters.errors["transfer_stuck"] += 1
    state.log(
        ERROR,
        "%s %d is stuck after %g s: %s; loads and stores stop until it ends",
        *(op.direction, op.op_id, state.config.transfer_timeout, reason),
    )
    if op.direction == "store":
        state.ledger.give_up(entry)
        entry.error = entry.error or reason
        state.index.quarantine(entry.keys, op.slots)
        state.counters.store_blocks["failed"] += len(op.slots)
        _tell(state, entry, "failed")


def idle_ranks(state: ControlState, entry: OpenOp, now: float) -> list[int]:
    """Ranks that have not completed the op and have nothing under way: the host has not given them the op, or has not
    collected or passed on its completion."""
    return [rank for rank in sorted(entry.pending) if state.ranks.idle_since(rank, entry.started, now)]


def stuck_reason(state: ControlState, entry: OpenOp, now: float) -> str:
    """Who keeps the op from ending: ranks that work on it, or the host."""
    idle = idle_ranks(state, entry, now)
    busy = sorted(entry.pending.difference(idle))
    reasons = [f"ranks {busy} have not finished it"] if busy else []
    if idle:
        uncollected = state.ranks.uncollected(idle)
        fault = f"not collected {uncollected} completions" if uncollected else "not submitted it, or lost its answer"
        reasons.append(f"the host has {fault}: ranks {idle} have nothing under way")
    return "; ".join(reasons)


def _settle(state: ControlState, entry: OpenOp) -> None:
    counters, op = state.counters, entry.op
    if op.direction == "load":
        state.unhold(entry.held)
        if entry.error:
            counters.miss_blocks["load_failed"] += len(op.blocks)
            counters.fallbacks["load_failed"] += 1
    else:
        _settle_store(state, entry)
    if entry.error:
        counters.transfers[op.direction, "error"] += 1
        counters.errors[f"{op.direction}_failed"] += 1
        state.log(WARNING, "%s %d of %d blocks failed: %s", op.direction, op.op_id, len(op.blocks), entry.error)
    else:
        num_bytes = len(op.blocks) * state.config.slot_bytes
        counters.count_transfer(op.direction, len(op.blocks), num_bytes, entry.seconds, entry.queue_seconds)
    if not entry.given_up:
        _tell(state, entry, "failed" if entry.error else "done")
    if entry.stuck:
        state.refresh_acceptance()


def _settle_store(state: ControlState, entry: OpenOp) -> None:
    outcomes, op = state.counters.store_blocks, entry.op
    if entry.given_up:
        state.index.end_quarantine(op.slots)
        state.slots.release(op.slots)
    elif entry.error:
        state.index.pending_stores.remove(entry.keys, op.slots)
        state.slots.release(op.slots)
        outcomes["failed"] += len(op.slots)
    else:
        published = state.index.publish(entry.keys, op.slots, state.clock())
        state.slots.release(published.freed)
        state.events.add("stored", published.keys)
        outcomes["stored"] += len(published.keys)
        outcomes["dropped_purged"] += len(published.freed)
        if state.slots.leaving:  # a resize has passed these slots already
            state.remove([slot for slot in op.slots if slot >= state.slots.limit], "resize")


def _tell(state: ControlState, entry: OpenOp, mark: Mark) -> None:
    op = entry.op
    state.settled.append(Settled(op.op_id, op.direction, mark, entry.request_id, op.blocks, entry.error))
