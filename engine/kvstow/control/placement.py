"""Placement: which keys of a store get a slot, and which slots those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstow.control.counters import STORE_REFUSALS
from kvstow.control.state import ControlState
from kvstow.messages import Op


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """What becomes of a store. `accepted[i]` is the index, in the keys given, of pair `i` of `op`; `op` is None
    when nothing is left to store. `outcomes` counts all other keys by reason."""

    op: Op | None
    accepted: tuple[int, ...]
    outcomes: dict[str, int]


def place_store(state: ControlState, keys: Sequence[bytes], blocks: Sequence[int], request_id: str) -> StoreGrant:
    """Open a store of what needs storing and finds room. The caller holds the lock."""
    now = state.clock()
    outcomes: dict[str, int] = {}
    op: Op | None = None
    fresh: list[int] = []
    refusal = state.gate.refuses_store(now)
    if refusal:
        outcomes[STORE_REFUSALS[refusal]] = len(keys)
    else:
        state.index.end_pins(now)
        fresh, present = _select(state, keys, outcomes)
        slots = _make_room(state, len(fresh), present, now)
        if len(slots) < len(fresh):
            outcomes["dropped_cpu_full"] = len(fresh) - len(slots)
            state.counters.allocation_failures += 1
            del fresh[len(slots) :]
        if fresh:
            new_keys = tuple([keys[i] for i in fresh])
            state.index.filling.add(new_keys, slots)
            moved = tuple([blocks[i] for i in fresh])
            op = state.ledger.open("store", moved, tuple(slots), keys=new_keys, held=(), request_id=request_id, now=now)
    for outcome, count in outcomes.items():
        state.counters.store_blocks[outcome] += count
    return StoreGrant(op, tuple(fresh), outcomes)


def _select(state: ControlState, keys: Sequence[bytes], outcomes: dict[str, int]) -> tuple[list[int], list[int]]:
    """(indices of the keys that need a slot, slots of those that are present)."""
    index = state.index
    slots = index.slots_of(keys)
    if index.needs_all(keys, slots):
        return list(range(len(keys))), []
    fresh: list[int] = []
    present: list[int] = []
    taken: set[bytes] = set()
    for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        if slot is not None:
            present.append(slot)
            reason = "skipped_already_cached"
        elif key in index.filling:
            reason = "skipped_in_flight"
        elif key in taken:
            reason = "skipped_duplicate"
        else:
            taken.add(key)
            fresh.append(i)
            continue
        outcomes[reason] = outcomes.get(reason, 0) + 1
    return fresh, present


def _make_room(state: ControlState, count: int, present: list[int], now: float) -> list[int]:
    """Up to `count` slots to fill: free ones, then evicted ones. Blocks of the same prefix are not evicted."""
    if present:
        state.index.hold(present, now)
    slots = state.slots.allocate(min(count, state.slots.free))
    while len(slots) < count and state.index.num_cached:
        removal = state.index.evict(count - len(slots))
        state.counters.evicted_blocks["capacity"] += len(removal.keys)
        state.counters.ages.count_evicted(state.index, removal.freed, now)
        state.events.add("removed", removal.keys, "capacity")
        slots += state.reuse(removal.freed)
    if present:
        state.unhold(present)
    slots.sort()  # neighbours for neighbours: look-ups and copies of a prefix go faster where its slots are in a row
    return slots
