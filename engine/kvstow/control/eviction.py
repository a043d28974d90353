"""Sweeps that remove blocks for an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstow.control.state import ControlState
from kvstow.control.sweep import Sweep


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


def scan(
    state: ControlState,
    kind: str,
    reason: str,
    dry_run: bool,
    wanted: Callable[[int], bool],
    prepare: Callable[[], object] | None = None,
) -> Sweep:
    """After `prepare`, go over all slots in order of their numbers, and remove the visible ones wanted."""
    index = state.index
    total = index.num_known_slots

    def work(sweep: Sweep) -> Iterator[None]:
        if prepare and not dry_run:
            with state.lock:
                prepare()
        while sweep.done < total:
            end = min(sweep.done + state.slice_slots, total)
            with state.lock:
                found = [s for s in range(sweep.done, end) if index.key_at(s) is not None and wanted(s)]
                sweep.evicted_slots += len(found) if dry_run else state.remove(found, reason)
            sweep.done = end
            yield

    return Sweep(kind, total, state.config.slot_bytes, work)


def purge_matching(state: ControlState, matches: Callable[[bytes], bool], dry_run: bool) -> Sweep:
    """Remove the visible blocks whose keys match, whatever holds them, and disown those being stored."""
    index = state.index

    def wanted(slot: int) -> bool:
        key = index.key_at(slot)
        return key is not None and matches(key)

    def disown() -> None:  # O(blocks that the host is storing now)
        index.filling.disown([key for key in index.filling if matches(key)])

    return scan(state, "purge", "purge", dry_run, wanted, prepare=disown)


def purge_keys(state: ControlState, keys: Sequence[bytes], dry_run: bool) -> Sweep:
    """`purge_matching` for exact keys: O(keys)."""
    wanted = list(dict.fromkeys(keys))

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < len(wanted):
            some = wanted[sweep.done : sweep.done + state.slice_slots]
            with state.lock:
                found = [slot for slot in state.index.slots_of(some) if slot is not None]
                if not dry_run:
                    state.index.filling.disown(some)
                    state.remove(found, "purge")
            sweep.evicted_slots += len(found)
            sweep.done += len(some)
            yield

    return Sweep("purge", len(wanted), state.config.slot_bytes, work)
