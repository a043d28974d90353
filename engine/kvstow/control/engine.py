"""The control plane as a host, its admin API, probes and metrics see it: snapshots and administration of one pool, and
the engine that is a pool with one session."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from heapq import merge
from itertools import chain, islice

from kvstow.config import EngineConfig
from kvstow.control.administration import Administrator
from kvstow.control.blockevents import BlockEventLog
from kvstow.control.contexts import Context, seconds_to
from kvstow.control.ops import OpenOp, OpenTierOp
from kvstow.control.pool import SLICE_SLOTS, Pool, PoolTarget
from kvstow.control.recording import Recording
from kvstow.control.session import Session, sessions_of
from kvstow.errors import ConflictError, IntegrityError
from kvstow.keys import format_key
from kvstow.messages import DesiredState
from kvstow.stats import EngineState, EngineStats, PendingTransfers, PoolStats, SlotCounts
from kvstow.status import (
    HOST_NAME,
    BlockPage,
    BlockStatus,
    ContextPage,
    ContextStatus,
    CurveEvidence,
    Readiness,
    SizeCurve,
    TransferState,
    TransferStatus,
)


class PoolFacade:
    """Snapshots and administration of one pool. Every call is safe from any thread.

    `check_integrity` holds the lock for O(pool). Snapshots hold it for O(1), unless they say otherwise.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.admin = Administrator(pool)

    @property
    def config(self) -> EngineConfig:
        return self.pool.config

    @property
    def engine_id(self) -> str:
        """Names this life of the pool."""
        return self.pool.target.desired.engine_id

    @property
    def events(self) -> BlockEventLog:
        """The blocks that were stored and removed lately."""
        return self.pool.events

    def tick(self) -> None:
        """Let time pass; see `Pool.tick`."""
        self.pool.tick()

    @property
    def used_slots(self) -> int:
        """How many slots hold a block, are being filled or are in quarantine. O(1), without the lock."""
        return self.pool.used_slots

    def desired(self) -> DesiredState:
        """Return the desired state of every rank."""
        with self.pool.lock:
            return self.pool.target.desired

    @property
    def integrity_error(self) -> str | None:
        """What the last integrity check has found; None if it has found nothing wrong."""
        with self.pool.lock:
            return self.pool.acceptance.integrity_error

    def check_integrity(self) -> None:
        """Compare all records with each other, without the lock. Raises `IntegrityError`. O(pool) with the lock held,
        1 s for a million slots: for tests and quiet hours."""
        pool = self.pool
        with pool.lock:
            defects = _defects(pool)
            pool.acceptance.integrity_error = "; ".join(defects) or None
            pool.counters.faults.errors["integrity"] += bool(defects)
        if defects:
            raise IntegrityError("; ".join(defects))

    def count_error(self, code: str) -> None:
        """Count an error of the host; `code` is one of `kvstow.stats.ERRORS`."""
        with self.pool.lock:
            self.pool.counters.faults.errors[code] += 1

    def curve(self) -> SizeCurve | None:
        """Return what pools of other sizes would have hit lately. None without `config.curve`, and before enough
        requests have ended. Does not take the pool's lock."""
        curve = self.pool.requests.curve
        return None if curve is None else curve.curve()

    def curve_evidence(self) -> CurveEvidence | None:
        """Return how much evidence there is for a curve, and how much it needs. None without `config.curve`."""
        curve = self.pool.requests.curve
        return None if curve is None else curve.evidence()

    @contextmanager
    def record(self, *, seconds: float, max_bytes: int) -> Iterator[Recording]:
        """Record the pool's requests while the context is open. Raises `InvalidRequestError` for limits that are too
        high, and `ConflictError` while another recording goes on."""
        pool = self.pool
        with pool.lock:
            if pool.requests.recording is not None and not pool.requests.recording.is_over:
                raise ConflictError(f"pool {pool.name} is being recorded already; it ends with its reader")
            if pool.requests.recording is not None:  # its reader has stalled, and must not keep its memory
                pool.requests.recording.stop()
            tokens = pool.config.block_tokens
            recording = Recording(pool.clock(), seconds=seconds, max_bytes=max_bytes, block_tokens=tokens)
            pool.requests.recording = recording
        try:
            yield recording
        finally:
            recording.stop()
            with pool.lock:
                if pool.requests.recording is recording:
                    pool.requests.recording = None

    # -- contexts -------------------------------------------------------------------------------------------

    def contexts(self, start_rank: int = 0, limit: int = 100) -> ContextPage:
        """Return the contexts that hints have named, the largest first. O(contexts), mostly without the lock."""
        pool = self.pool
        with pool.lock:
            known = pool.requests.contexts.all()
        known.sort(key=lambda context: len(context.chain), reverse=True)
        page = known[start_rank : start_rank + limit]
        with pool.lock:
            now = pool.clock()
            found = tuple([_context(pool, context, now) for context in page])
        following = start_rank + limit
        return ContextPage(found, following if following < len(known) else None, len(known))

    def context(self, context: bytes) -> list[ContextStatus]:
        """Return the contexts with this id, in all namespaces."""
        pool = self.pool
        with pool.lock:
            now = pool.clock()
            return [_context(pool, found, now) for found in pool.requests.contexts.find(context)]

    # -- snapshots ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return one consistent copy of all counters. O(1)."""
        pool, config = self.pool, self.pool.config
        with pool.lock:
            now = pool.clock()
            pool_stats = PoolStats(
                name=pool.name,
                capacity_slots=pool.capacity,
                usable_slots=pool.slots.in_service,
                slot_bytes=config.slot_bytes,
                policy=pool.policy,
                leases=pool.num_leases,
                slots=_slot_counts(pool),
            )
            return pool.counters.snapshot(_state_of(pool, now)[0], pool_stats, _pending(pool, now), config.block_tokens)

    def readiness(self) -> Readiness:
        """Return whether traffic can flow, the reason if not, and the status of each rank. O(ranks)."""
        pool = self.pool
        with pool.lock:
            now = pool.clock()
            name, reason = _state_of(pool, now)
            engines = [session for session in sessions_of(pool) if session.is_engine and not session.is_lost]
            ranks = [status for session in engines for status in session.rank_statuses(now)]
            return Readiness(name, reason, pool.slots.in_service, pool.capacity, tuple(ranks))

    def transfers(self, limit: int = 1000) -> list[TransferStatus]:
        """Return up to `limit` ops in flight, the oldest first."""
        pool = self.pool
        with pool.lock:
            now = pool.clock()
            by_session = [
                [(entry.op.op_id, entry, session) for entry in islice(session.ops, limit)]
                for session in sessions_of(pool)
            ]
            return [_transfer(entry, session, now) for _, entry, session in islice(merge(*by_session), limit)]

    def block(self, key: bytes) -> BlockStatus | None:
        """Return the visible block under `key`, or None."""
        pool = self.pool
        with pool.lock:
            slots = pool.index.namespaces.find_all((key,))
            return _block(pool, slots[0], key, pool.clock()) if slots else None

    def blocks(self, start_slot: int = 0, limit: int = 100) -> BlockPage:
        """Return visible blocks in the order of their slots, from `start_slot` on. Visits at most 1,024 slots, so a
        page may be short or empty and still have a `next_slot`."""
        pool = self.pool
        with pool.lock:
            now = pool.clock()
            end = min(start_slot + SLICE_SLOTS, pool.index.slot_keys.num_slots)
            found: list[BlockStatus] = []
            slot = start_slot
            while slot < end and len(found) < limit:
                key = pool.index.slot_keys.key_of[slot]
                if key is not None:
                    found.append(_block(pool, slot, key, now))
                slot += 1
            return BlockPage(tuple(found), slot if slot < pool.index.slot_keys.num_slots else None)


class OffloadEngine(Session, PoolFacade):
    """A pool with one session, in the same process. The pool's memory belongs to the session's ranks, and is lost when
    one of them restarts.

    It decides which block is in which slot, and tracks every copy until all ranks have finished it. It guarantees that
    a key is visible only once every rank holds its bytes, that a slot is reused only when no rank may still read or
    write it, and that op ids are never reused. `Session` and `PoolFacade` say what a call costs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_slots: int = SLICE_SLOTS,
    ) -> None:
        """`slice_slots`: how many slots bulk work visits before it releases the lock."""
        pool = Pool(config, clock, PoolTarget(config.capacity_slots), slice_slots=slice_slots)
        Session.__init__(self, pool, HOST_NAME)
        PoolFacade.__init__(self, self.pool)
        self.name = self.engine_id

    def close(self) -> None:
        """Serve nothing from now on, because the host stops. Idempotent."""
        with self.pool.lock:
            self.closed = self.pool.acceptance.closed = True


def _defects(pool: Pool) -> list[str]:
    """Return inconsistencies between the records of the control plane. O(pool); the caller holds the lock."""
    in_use = pool.index.slots_in_use()
    found = chain(_defects_of_slots(pool, in_use), _defects_of_transfers(pool, in_use), _defects_of_holds(pool))
    return [*pool.index.defects(), *found]


def _defects_of_slots(pool: Pool, in_use: Mapping[str, set[int]]) -> Iterator[str]:
    """Check that each used slot is in one state, and that the counts of slots are right."""
    used = pool.slots.used_slots()
    listed = sorted(slot for slots in in_use.values() for slot in slots)
    if len(set(listed)) != len(listed):
        yield "a slot is in two states"
    if set(listed) != used:
        yield f"{len(set(listed) ^ used)} used slots have no state, or free slots have one"
    if pool.slots.counted() != (pool.slots.free, pool.slots.in_service):
        yield "the counts of free slots and slots in service are wrong"
    if pool.slots.leaving != sum(slot >= pool.slots.limit for slot in used):
        yield "the count of used slots above the limit is wrong"
    kept = {slot for slot in pool.index.visible_slots() if slot not in pool.lost}
    if any(map(pool.index.times.outlived_a_loss, kept)):
        yield "blocks that a rank has lost are visible"
    if not pool.target.is_resizing and any(slot >= pool.slots.limit for slot in kept):
        yield "blocks above the usable slots are visible"
    counts = _slot_counts(pool)
    if counts.usable != pool.slots.in_service:
        yield f"the states {counts} do not add up to {pool.slots.in_service}"


def _defects_of_transfers(pool: Pool, in_use: Mapping[str, set[int]]) -> Iterator[str]:
    """Check that the slots that are being written belong to the open stores."""
    if not all(session.ops.is_consistent() for session in sessions_of(pool)):
        yield "the list of transfers that may become stuck is wrong"
    stores = [entry for session in sessions_of(pool) for entry in session.ops if entry.fills_slots]
    for name, abandoned in (("filling", False), ("quarantined", True)):
        written = {slot for entry in stores if entry.abandoned is abandoned for slot in entry.written}
        if abandoned:
            written.update(*(session.quarantined_slots for session in sessions_of(pool)))
        if written != in_use[name]:
            yield f"the {name} slots are not those of the open stores"


def _defects_of_holds(pool: Pool) -> Iterator[str]:
    """Check that exactly the slots of leases and loads are held, and that the counts of leases and sessions are
    right."""
    held = chain(pool.debts.slots, *(session.held_slots() for session in sessions_of(pool)))
    holders = Counter(slot for slots in held for slot in slots)
    if holders != {slot: pool.index.held.count(slot) for slot in pool.index.held.slots()}:
        yield "the held slots are not those of leases and loads"
    if pool.debts.num_slots != sum(map(len, pool.debts.slots)):
        yield "the count of owed slots is wrong"
    if not all(session.leases.is_consistent() for session in sessions_of(pool)):
        yield "the count of leased slots is wrong"
    users = Counter(session.namespace for session in sessions_of(pool) if session.is_engine and not session.is_lost)
    if any(namespace.num_sessions != users[namespace] for namespace in pool.index.namespaces):
        yield "the count of a namespace's sessions is wrong"


def _slot_counts(pool: Pool) -> SlotCounts:
    index = pool.index
    return SlotCounts(
        free=pool.slots.free,
        filling=index.num_filling,
        cached=index.num_cached,
        leased=len(index.held),
        quarantined=len(index.quarantined),
    )


def _pending(pool: Pool, now: float) -> PendingTransfers:
    loads = stores = load_blocks = store_blocks = stuck = 0
    started = now
    for session in sessions_of(pool):
        ops = session.ops
        loads += ops.num_ops["load"]
        stores += ops.num_ops["store"]
        load_blocks += ops.num_blocks["load"]
        store_blocks += ops.num_blocks["store"]
        stuck += ops.num_stuck
        oldest = ops.oldest_copy()
        if oldest:
            started = min(started, oldest.started)
    slot_bytes = pool.config.slot_bytes
    return PendingTransfers(
        loads=loads,
        stores=stores,
        load_blocks=load_blocks,
        store_blocks=store_blocks,
        load_bytes=load_blocks * slot_bytes,
        store_bytes=store_blocks * slot_bytes,
        oldest_seconds=now - started,
        stuck=stuck,
    )


def _state_of(pool: Pool, now: float) -> tuple[EngineState, str]:
    """Return the engine's state, and the reason for it as a sentence."""
    if pool.acceptance.closed:
        return "stopped", "the engine was closed"
    if pool.acceptance.drain_mode:
        return "draining", f"it drains (mode {pool.acceptance.drain_mode})"
    trouble = _trouble(pool, now)
    if trouble:
        return "degraded", trouble
    silent = pool.silent_ranks()
    if silent:
        return "starting", f"ranks {silent} have not reported yet"
    if pool.slots.limit < pool.target.ceiling:
        return "pinning", f"{pool.slots.limit} of {pool.target.ceiling} slots are pinned on every rank"
    return "ready", "all slots are pinned"


def _trouble(pool: Pool, now: float) -> str:
    for session in sessions_of(pool):
        if session.host_error:
            return f"{session.label}the host has failed: {session.host_error}"
    if pool.acceptance.integrity_error:
        return f"an integrity check failed: {pool.acceptance.integrity_error}"
    for session in sessions_of(pool):
        trouble = _session_trouble(session, now) if session.is_engine and not session.is_lost else ""
        if trouble:
            return session.label + trouble
    return ""


def _session_trouble(session: Session, now: float) -> str:
    if session.ops.num_stuck:
        oldest = session.ops.oldest_copy()
        assert oldest is not None
        number, reason = session.ops.num_stuck, session.ops.stuck_reason(oldest, now)
        if number == 1:
            return f"a transfer is stuck: {reason}"
        return f"{number} transfers are stuck, the oldest because {reason}"
    for record in session.ranks.records():
        report = record.report
        if record.reported_at is None:
            continue
        if report.state in ("degraded", "failed", "stopped"):
            return f"rank {report.rank} is {report.state}: {report.error or 'no reason given'}"
        age = now - record.reported_at
        if age > session.pool.config.report_timeout:
            return f"rank {report.rank} has been silent for {age:.1f} s"
    return ""


def _transfer(entry: OpenOp, session: Session, now: float) -> TransferStatus:
    op = entry.op
    ranks = len(session.pool.config.storing_ranks) if op.direction != "load" else len(session.ranks)
    phase: TransferState = "queued"
    if entry.abandoned:
        phase = "quarantined"
    elif entry.stuck:
        phase = "stuck"
    elif len(entry.pending) < ranks or (op.direction == "store" and len(entry.reading) < ranks):
        phase = "running"
    return TransferStatus(
        op_id=op.op_id,
        pool=session.pool.name,
        session=session.name,
        direction=op.direction,
        state=phase,
        blocks=len(op.slots),
        bytes=len(op.slots) * session.pool.config.slot_bytes,
        age_seconds=now - entry.started,
        pending_ranks=tuple(sorted(entry.pending)),
        idle_ranks=() if isinstance(entry, OpenTierOp) else tuple(session.ops.idle_ranks(entry, now)),
        failed=entry.error is not None,
        request_id=entry.request_id,
    )


def _context(pool: Pool, context: Context, now: float) -> ContextStatus:
    blocks, tokens = len(context.chain), pool.config.block_tokens
    return ContextStatus(
        context=context.context_id.hex(),
        name=context.name,
        namespace=context.namespace.name,
        blocks=blocks,
        bytes=blocks * pool.config.slot_bytes,
        tokens=None if tokens is None else blocks * tokens,
        requests=context.requests,
        idle_seconds=now - context.ended_at,
        resume_in_seconds=seconds_to(context, now),
    )


def _block(pool: Pool, slot: int, key: bytes, now: float) -> BlockStatus:
    index = pool.index
    holds = index.held.count(slot)
    return BlockStatus(
        key=format_key(key),
        namespace=index.namespaces.of_slot(slot).name,
        slot=slot,
        state="leased" if holds else "cached",
        age_seconds=now - index.times.stored_at(slot),
        idle_seconds=now - index.times.used_at(slot),
        leases=holds,
    )
