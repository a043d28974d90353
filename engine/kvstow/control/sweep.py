"""A sweep: administrative work over many slots, done in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

SLICE_SLOTS = 1024
"""Slots per slice. Evicting that many holds the engine's lock for less than a millisecond."""


class Sweep:
    """Bulk work that frees the engine's lock between slices, so that no scheduler waits for all of it.

    Used by one thread at a time, which works it to the end or cancels it, whatever fails. `total` and `done` count
    slots to look at; `evicted_slots` and `evicted_bytes` (of one rank) what was, or in a dry run would be, removed.
    `waiting`: the next slice can do nothing until transfers or leases end; ask again later.
    """

    def __init__(
        self,
        kind: str,
        total: int,
        slot_bytes: int,
        work: Callable[[Sweep], Iterator[None]],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """`work` does one slice up to each yield, and holds no lock there: an abandoned generator is closed by the
        garbage collector, on any thread, which may hold the lock itself. So `undo` is called if the sweep is
        cancelled or fails, and `work` has no `finally` that takes the lock."""
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
        """Do one slice; True while there is more to do."""
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
        """Work to the end, or to where it must wait."""
        while self.step() and not self.waiting:
            pass
        return self

    def cancel(self) -> None:
        """Do no further slice; what was done stays done. A resize puts the capacity back."""
        if not self.finished:
            self.cancelled = self.finished = True
            self._undo()
