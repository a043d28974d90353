"""Sweeps: administrative work over many slots, done in slices, and those that remove blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.control.namespaces import Namespace
    from kvstow.control.pool import Pool

SLICE_SLOTS = 1024
"""Slots per slice. Evicting that many holds the engine's lock for less than a millisecond."""


class Sweep:
    """Bulk work that releases the engine's lock between slices, so that no scheduler waits for all of it.

    Used by one thread at a time, which steps it to the end or cancels it, even after an error. `total` and `done` count
    slots to visit; `evicted_slots` and `evicted_bytes` (of one rank) count what was removed, or would be in a dry run.
    `waiting`: the next slice can do nothing until transfers or leases end; try again later.
    """

    def __init__(
        self,
        kind: str,
        total: int,
        slot_bytes: int,
        work: Callable[[Sweep], Iterator[None]],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """`work` does one slice up to each yield, where it holds no lock. The garbage collector may close an abandoned
        generator on a thread that holds the lock, so `work` must have no `finally` that takes it; instead, `undo` is
        called if the sweep is cancelled or fails."""
        self.kind = kind
        self.total = total
        self.done = 0
        self.evicted_slots = 0
        self.waiting = False
        self.finished = False
        self.cancelled = False
        self._slot_bytes = slot_bytes
        self._slices = work(self)
        self._undo = undo

    @property
    def evicted_bytes(self) -> int:
        return self.evicted_slots * self._slot_bytes

    def step(self) -> bool:
        """Do one slice. True while there is more to do."""
        if not self.finished:
            try:
                next(self._slices)
            except StopIteration:
                self.finished = True
            except BaseException:
                self.finished = True
                self._undo()
                raise
        return not self.finished

    def run(self) -> Sweep:
        """Step until the end, or until it must wait."""
        while self.step() and not self.waiting:
            pass
        return self

    def cancel(self) -> None:
        """Do no further slice. What was done is kept, but a resize restores the capacity."""
        if not self.finished:
            self.cancelled = self.finished = True
            self._undo()


Wanted = Callable[[int, int], list[int]]
"""Selects the visible slots of a range to remove. Called with the lock held."""


def evict_next(pool: Pool, kind: str, reason: str, count: int, dry_run: bool) -> Sweep:
    """Remove the next `count` evictable blocks in the policy's order."""

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < count:
            with pool.lock:
                if dry_run:
                    found = slice_size = min(count, pool.index.num_cached)
                else:
                    slice_size = min(pool.slice_slots, count - sweep.done)
                    removal = pool.index.evict(slice_size)
                    pool.note_removal(removal, reason)
                    found = len(removal.keys)
            sweep.evicted_slots += found
            sweep.done += found
            if dry_run or found < slice_size:
                sweep.total = sweep.done
                return
            yield

    return Sweep(kind, count, pool.config.slot_bytes, work)


def scan(pool: Pool, kind: str, reason: str, dry_run: bool, wanted: Wanted) -> Sweep:
    """Visit all slots in ascending order, and remove the blocks in those that `wanted` selects."""
    total = pool.index.slot_keys.num_slots
    return Sweep(kind, total, pool.config.slot_bytes, lambda sweep: _scan(sweep, pool, reason, dry_run, wanted))


def _scan(sweep: Sweep, pool: Pool, reason: str, dry_run: bool, wanted: Wanted) -> Iterator[None]:
    while sweep.done < sweep.total:
        end = min(sweep.done + pool.slice_slots, sweep.total)
        with pool.lock:
            found = wanted(sweep.done, end)
            sweep.evicted_slots += len(found) if dry_run else pool.remove_blocks(found, reason)
        sweep.done = end
        yield


def purge_matching(pool: Pool, matches: Callable[[bytes], bool], dry_run: bool) -> Sweep:
    """Remove the visible blocks whose keys match, including held and protected ones, and disown those being stored."""
    index = pool.index

    def wanted(low: int, high: int) -> list[int]:
        return [slot for slot, key in index.slot_keys.between(low, high) if matches(key)]

    def work(sweep: Sweep) -> Iterator[None]:
        if not dry_run:
            with pool.lock:
                filling = index.namespaces.keys_being_stored()
            for start in range(0, len(filling), pool.slice_slots):  # the scan finds keys that become visible meanwhile
                matching = [key for key in filling[start : start + pool.slice_slots] if matches(key)]
                with pool.lock:
                    index.namespaces.disown(matching)
                yield
        yield from _scan(sweep, pool, "purge", dry_run, wanted)

    return Sweep("purge", index.slot_keys.num_slots, pool.config.slot_bytes, work)


def purge_keys(pool: Pool, keys: Sequence[bytes], dry_run: bool) -> Sweep:
    """`purge_matching` for exact keys: O(keys)."""
    wanted = list(dict.fromkeys(keys))

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < len(wanted):
            some = wanted[sweep.done : sweep.done + pool.slice_slots]
            with pool.lock:
                found = pool.index.namespaces.find_all(some)
                if not dry_run:
                    pool.index.namespaces.disown(some)
                    pool.remove_blocks(found, "purge")
            sweep.evicted_slots += len(found)
            sweep.done += len(some)
            yield

    return Sweep("purge", len(wanted), pool.config.slot_bytes, work)


def drop_namespace(pool: Pool, namespace: Namespace) -> Sweep:
    """Remove the blocks of a dropped namespace. A held slot is freed when its last lease or load ends."""
    index = pool.index

    def wanted(low: int, high: int) -> list[int]:
        return index.namespaces.slots_of(namespace, low, high)

    def work(sweep: Sweep) -> Iterator[None]:
        yield from _scan(sweep, pool, "purge", False, wanted)
        with pool.lock:
            index.namespaces.forget_if_empty(namespace)

    return Sweep("purge", index.slot_keys.num_slots, pool.config.slot_bytes, work)
