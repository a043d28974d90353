"""Sweeps that remove blocks for an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstow.control.state import ControlState
from kvstow.control.sweep import Sweep

Wanted = Callable[[int, int], list[int]]
"""Which visible slots of a range are to be removed. Called with the lock held."""


def evict_next(state: ControlState, kind: str, reason: str, count: int, dry_run: bool) -> Sweep:
    """Remove the next `count` evictable blocks in the policy's order."""

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < count:
            with state.lock:
                if dry_run:
                    found = slice_size = min(count, state.index.num_cached)
                else:
                    slice_size = min(state.slice_slots, count - sweep.done)
                    removal = state.index.evict(slice_size)
                    state.removed(removal, reason)
                    found = len(removal.keys)
            sweep.evicted_slots += found
            sweep.done += found
            if dry_run or found < slice_size:
                sweep.total = sweep.done
                return
            yield

    return Sweep(kind, count, state.config.slot_bytes, work)


def scan(state: ControlState, kind: str, reason: str, dry_run: bool, wanted: Wanted) -> Sweep:
    """Visit all slots in ascending order, and remove the visible ones that are wanted."""
    total = state.index.keys.num_slots
    return Sweep(kind, total, state.config.slot_bytes, lambda sweep: _scan(sweep, state, reason, dry_run, wanted))


def _scan(sweep: Sweep, state: ControlState, reason: str, dry_run: bool, wanted: Wanted) -> Iterator[None]:
    while sweep.done < sweep.total:
        end = min(sweep.done + state.slice_slots, sweep.total)
        with state.lock:
            found = wanted(sweep.done, end)
            sweep.evicted_slots += len(found) if dry_run else state.remove(found, reason)
        sweep.done = end
        yield


def purge_matching(state: ControlState, matches: Callable[[bytes], bool], dry_run: bool) -> Sweep:
    """Remove the visible blocks whose keys match, whatever holds them, and disown those being stored."""
    index = state.index

    def wanted(low: int, high: int) -> list[int]:
        return [slot for slot, key in index.keys.between(low, high) if matches(key)]

    def work(sweep: Sweep) -> Iterator[None]:
        if not dry_run:
            with state.lock:
                filling = list(index.pending_stores)
            for start in range(0, len(filling), state.slice_slots):  # what becomes visible meanwhile, the scan finds
                matching = [key for key in filling[start : start + state.slice_slots] if matches(key)]
                with state.lock:
                    index.pending_stores.disown(matching)
                yield
        yield from _scan(sweep, state, "purge", dry_run, wanted)

    return Sweep("purge", index.keys.num_slots, state.config.slot_bytes, work)


def purge_keys(state: ControlState, keys: Sequence[bytes], dry_run: bool) -> Sweep:
    """`purge_matching` for exact keys: O(keys)."""
    wanted = list(dict.fromkeys(keys))

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < len(wanted):
            some = wanted[sweep.done : sweep.done + state.slice_slots]
            with state.lock:
                found = [slot for slot in state.index.keys.slots_of(some) if slot is not None]
                if not dry_run:
                    state.index.pending_stores.disown(some)
                    state.remove(found, "purge")
            sweep.evicted_slots += len(found)
            sweep.done += len(some)
            yield

    return Sweep("purge", len(wanted), state.config.slot_bytes, work)
