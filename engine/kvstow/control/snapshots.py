"""Snapshots of the control plane for the admin API, probes and metrics."""

from __future__ import annotations

from itertools import islice
from math import inf

from kvstow.control.ops import OpenOp
from kvstow.control.state import ControlState
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.keys import format_key
from kvstow.stats import EngineState, EngineStats, PendingTransfers, PoolStats, SlotCounts, SlotState
from kvstow.status import BlockPage, BlockStatus, Readiness, TransferState, TransferStatus


def stats(state: ControlState) -> EngineStats:
    config = state.config
    with state.lock:
        now = state.clock()
        pool = PoolStats(
            capacity_slots=state.capacity,
            usable_slots=state.slots.in_service,
            slot_bytes=config.slot_bytes,
            policy=state.index.policy.name,
            leases=len(state.leases),
            slots=_slot_counts(state),
        )
        return state.counters.snapshot(_state_of(state, now)[0], pool, _pending(state, now), config.block_tokens)


def readiness(state: ControlState) -> Readiness:
    with state.lock:
        now = state.clock()
        name, reason = _state_of(state, now)
        return Readiness(name, reason, state.slots.in_service, state.capacity, state.ranks.statuses(now))


def transfers(state: ControlState, limit: int) -> list[TransferStatus]:
    with state.lock:
        now = state.clock()
        return [_transfer(entry, state, now) for entry in islice(state.ops, limit)]


def block(state: ControlState, key: bytes) -> BlockStatus | None:
    with state.lock:
        (slot,) = state.index.keys.slots_of((key,))
        return None if slot is None else _block(state, slot, key, state.clock())


def blocks(state: ControlState, start_slot: int, limit: int) -> BlockPage:
    with state.lock:
        now = state.clock()
        end = min(start_slot + SLICE_SLOTS, state.index.keys.num_slots)
        found: list[BlockStatus] = []
        slot = start_slot
        while slot < end and len(found) < limit:
            key = state.index.keys.key_of[slot]
            if key is not None:
                found.append(_block(state, slot, key, now))
            slot += 1
        return BlockPage(tuple(found), slot if slot < state.index.keys.num_slots else None)


def defects(state: ControlState) -> list[str]:
    """Inconsistencies between the records of the control plane. O(pool); the caller holds the lock."""
    found = state.index.defects()
    in_use = state.index.slots_in_use()
    used = state.slots.used_slots()
    listed = sorted(slot for slots in in_use.values() for slot in slots)
    if len(set(listed)) != len(listed):
        found.append("a slot is in two states")
    if set(listed) != used:
        found.append(f"{len(set(listed) ^ used)} used slots are in no state, or free ones in some")
    if state.slots.counted() != (state.slots.free, state.slots.in_service):
        found.append("the counts of free slots and slots in service are wrong")
    if state.slots.leaving != sum(slot >= state.slots.limit for slot in used):
        found.append("the count of used slots above the limit is wrong")
    kept = {slot for slot in state.index.keys.slots() if slot not in state.lost}
    if any(map(state.index.times.outlived_a_loss, kept)):
        found.append("blocks that a rank has lost are visible")
    if not state.resizing and any(slot >= state.slots.limit for slot in kept):
        found.append("blocks above the usable slots are visible")
    counts = _slot_counts(state)
    if counts.usable != state.slots.in_service:
        found.append(f"the states {counts} do not add up to {state.slots.in_service}")
    if not state.ops.is_consistent():
        found.append("the transfers that may become stuck are not those that are not stuck")
    stores = [entry for entry in state.ops if entry.op.direction == "store"]
    for name, abandoned in (("filling", False), ("quarantined", True)):
        written = {slot for entry in stores if entry.abandoned is abandoned for slot in entry.op.slots}
        if written != in_use[name]:
            found.append(f"the {name} slots are not those of the open stores")
    return found


def _slot_counts(state: ControlState) -> SlotCounts:
    index = state.index
    return SlotCounts(
        free=state.slots.free,
        filling=len(index.pending_stores),
        cached=index.num_cached,
        leased=index.num_leased,
        protected=index.num_protected,
        quarantined=index.num_quarantined,
    )


def _pending(state: ControlState, now: float) -> PendingTransfers:
    ops, slot_bytes = state.ops, state.config.slot_bytes
    oldest = ops.oldest()
    return PendingTransfers(
        loads=ops.num_ops["load"],
        stores=ops.num_ops["store"],
        load_blocks=ops.num_blocks["load"],
        store_blocks=ops.num_blocks["store"],
        load_bytes=ops.num_blocks["load"] * slot_bytes,
        store_bytes=ops.num_blocks["store"] * slot_bytes,
        oldest_seconds=now - oldest.started if oldest else 0.0,
        stuck=ops.num_stuck,
    )


def _state_of(state: ControlState, now: float) -> tuple[EngineState, str]:
    """The engine's state, and the reason for it as a sentence."""
    if state.acceptance.closed:
        return "stopped", "the engine was closed"
    if state.acceptance.drain_mode:
        return "draining", f"an operator drains the engine (mode {state.acceptance.drain_mode})"
    trouble = _trouble(state, now)
    if trouble:
        return "degraded", trouble
    silent = [record.report.rank for record in state.ranks.records() if record.reported_at is None]
    if silent:
        return "starting", f"ranks {silent} have not reported yet"
    if state.slots.limit < state.ceiling:
        return "pinning", f"{state.slots.limit} of {state.ceiling} slots are pinned on every rank"
    return "ready", "all slots are pinned"


def _trouble(state: ControlState, now: float) -> str:
    if state.host_error:
        return f"the host has failed: {state.host_error}"
    if state.integrity_error:
        return f"an integrity check failed: {state.integrity_error}"
    if state.ops.num_stuck:
        oldest = state.ops.oldest()
        assert oldest is not None
        return f"{state.ops.num_stuck} transfers are stuck: {state.ops.stuck_reason(oldest, now)}"
    for record in state.ranks.records():
        report = record.report
        if record.reported_at is None:
            continue
        if report.state in ("degraded", "failed", "stopped"):
            return f"rank {report.rank} is {report.state}: {report.error or 'no reason given'}"
        age = now - record.reported_at
        if age > state.config.report_timeout:
            return f"rank {report.rank} has been silent for {age:.1f} s"
    return ""


def _transfer(entry: OpenOp, state: ControlState, now: float) -> TransferStatus:
    op = entry.op
    phase: TransferState = "queued"
    if entry.abandoned:
        phase = "quarantined"
    elif entry.stuck:
        phase = "stuck"
    elif len(entry.pending) < len(state.ranks) or (op.direction == "store" and len(entry.reading) < len(state.ranks)):
        phase = "running"
    return TransferStatus(
        op_id=op.op_id,
        direction=op.direction,
        state=phase,
        blocks=len(op.blocks),
        bytes=len(op.blocks) * state.config.slot_bytes,
        age_seconds=now - entry.started,
        pending_ranks=tuple(sorted(entry.pending)),
        idle_ranks=tuple(state.ops.idle_ranks(entry, now)),
        failed=entry.error is not None,
        request_id=entry.request_id,
    )


def _block(state: ControlState, slot: int, key: bytes, now: float) -> BlockStatus:
    index = state.index
    expiry = index.protection_end(slot)
    holds = index.holds(slot)
    name: SlotState = "protected" if expiry is not None else "leased" if holds else "cached"
    return BlockStatus(
        key=format_key(key),
        slot=slot,
        state=name,
        age_seconds=now - index.times.stored_at(slot),
        idle_seconds=now - index.times.used_at(slot),
        leases=holds,
        protection_ttl_seconds=None if expiry is None or expiry == inf else max(0.0, expiry - now),
    )
