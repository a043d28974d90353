"""Placement: which keys of a store get which slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvstow.control.indexjournal import fit
from kvstow.control.ops import OpsInFlight
from kvstow.control.pool import Pool, PoolSession
from kvstow.control.slots import values_at
from kvstow.messages import Op
from kvstow.results import StoreGrant
from kvstow.status import Refusal

_OUTCOME_OF: dict[Refusal, str] = {
    "not_ready": "dropped_not_ready",
    "draining": "dropped_draining",
    "bypassed": "skipped_bypass",
}
_EVICTIONS_PER_SLOT = 4
"""Blocks that a store may evict for each slot that it lacks. While the pool shrinks, most evictable blocks may be above
its new limit, and evicting them frees no usable slot."""


def place_store(
    session: PoolSession, ops: OpsInFlight, keys: Sequence[bytes], blocks: Sequence[int], request_id: str
) -> StoreGrant:
    """Start a store of the keys that need a slot and find one, as one of the session's `ops`. The caller holds the
    lock. O(keys) in every state."""
    pool = session.pool
    now = pool.clock()
    outcomes: dict[str, int] = {}
    op: Op | None = None
    fresh: list[int] = []
    unplaced: Sequence[int] = ()
    refusal = _refusal(session, now)
    if refusal:
        outcomes[_OUTCOME_OF[refusal]] = len(keys)
        unplaced = range(len(keys))
    else:
        fresh, present = session.namespace.select(keys, outcomes)
        slots = _make_room(session, len(fresh), present, now)
        if len(slots) < len(fresh):
            outcomes["dropped_cpu_full"] = len(fresh) - len(slots)
            pool.counters.allocation_failures += 1
            unplaced = fresh[len(slots) :]
            del fresh[len(slots) :]
        if fresh:
            session.namespace.begin(keys, fresh, slots)
            if pool.journal is not None:
                pool.journal.begin(slots, session.session_id)
            moved = values_at(blocks, fresh)
            op = ops.start("store", moved, tuple(slots), request_id=request_id, now=now)
    for outcome, count in outcomes.items():
        pool.counters.stores[outcome] += count
    return StoreGrant(op, tuple(fresh), outcomes, unplaced)


def place_fetch(
    session: PoolSession, keys: Sequence[bytes], *, whole: bool = False
) -> tuple[Sequence[bytes], Sequence[int]]:
    """Returns the leading ones of those keys that are neither visible nor being filled, and slots for them, in
    ascending order, which are being filled from now on. Evicts as needed, but no blocks of these keys. `whole`: none of
    the keys if there are not slots for all. None in a namespace that is dropped or forgotten: the fleet tier's session
    does not keep it; and none of keys that the pool's journal could not publish. The caller holds the lock. O(keys)."""
    pool = session.pool
    now = pool.clock()
    if session.namespace.is_dropped or _refusal(session, now):
        return [], []
    if pool.journal is not None and not fit(keys):
        return [], []
    fresh, present = session.namespace.select(keys, {})
    slots = _make_room(session, len(fresh), present, now)
    if whole and len(slots) < len(fresh):
        pool.deallocate(slots)
        return [], []
    wanted = session.namespace.begin(keys, fresh[: len(slots)], slots)
    if pool.journal is not None:
        pool.journal.begin(slots, session.session_id)
    return wanted, slots


def has_room(session: PoolSession, keys: Sequence[bytes]) -> bool:
    """Whether `place_fetch` would find slots for all of the keys; as little exact as `store_room`. The caller holds the
    lock. O(keys)."""
    fresh, present = session.namespace.select(keys, {})
    return len(fresh) <= store_room(session, kept=len(session.pool.index.evictable(present)))


def store_room(session: PoolSession, *, kept: int = 0) -> int:
    """Slots for a store, free or by eviction; 0 while stores are refused. `kept`: evictable blocks that must stay. An
    upper bound while the session has not registered all slots, or leases too many. The caller holds the lock."""
    pool = session.pool
    if _refusal(session, pool.clock()):
        return 0
    room = pool.slots.free
    if pool.earlier is None:
        room += pool.index.num_cached - kept + sum(one.leases.excess_slots for one in pool.sessions)
    return room if session.watermark is None else min(room, session.watermark)


def _refusal(session: PoolSession, now: float) -> Refusal | None:
    """Why no store may start, which includes that no slot is pinned yet."""
    return session.refusal("store", now) or (None if session.pool.slots.limit else "not_ready")


def _make_room(session: PoolSession, count: int, present: Sequence[Sequence[int]], now: float) -> list[int]:
    """Up to `count` slots to fill: free ones, then evicted ones. Blocks of the same prefix count as used and are not
    evicted.

    Slots are in ascending order: copies and lookups of a prefix are faster if its slots are neighbours."""
    pool = session.pool
    below = session.watermark
    slots = pool.slots.allocate(min(count, pool.slots.free), below)
    missing = count - len(slots)
    if missing and present:
        held = list(chain.from_iterable(present))
        pool.index.times.mark_used(present, now)
        pool.index.hold(held)
        slots += _evict(pool, missing, now, below)
        slots += _evict_leased(pool, count - len(slots), now, below)
        pool.unhold(held)
    elif missing:
        slots += _evict(pool, missing, now, below)
        slots += _evict_leased(pool, count - len(slots), now, below)
    elif present:
        pool.index.refresh(present, now)
    slots.sort()
    return slots


def _evict_leased(pool: Pool, count: int, now: float, below: int | None) -> list[int]:
    """The same, when nothing is left to evict but leased blocks: those of sessions that lease too much."""
    if not count or pool.earlier is not None or not pool.end_excess_leases():  # with `earlier`, nothing is evicted
        return []
    return _evict(pool, count, now, below)


def _evict(pool: Pool, count: int, now: float, below: int | None) -> list[int]:
    """Evict blocks for up to `count` slots, all below `below` unless that is None."""
    index, slots = pool.index, list[int]()
    if pool.earlier is not None:
        return slots
    budget = _EVICTIONS_PER_SLOT * count
    while len(slots) < count and budget > 0:
        if below is None:
            removal = index.evict(min(count - len(slots), budget))
            budget -= len(removal.keys)
        else:
            removal = index.evict_below(below, count - len(slots), budget)
            budget = 0
        if not removal.keys:
            break
        pool.counters.evictions["capacity"] += len(removal.keys)
        pool.ages.sample_evicted(removal.freed, now)
        index.uses.note_ages(removal.freed, now)
        pool.note_removed_keys(removal, "capacity")
        slots += pool.reuse(removal.freed)
    return slots
