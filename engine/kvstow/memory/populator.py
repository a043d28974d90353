"""The thread that backs a pool's address space by memory, a little ahead of what is pinned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstow.memory.region import HostRegion

_PIECE_BYTES = 32 << 20  # between two looks at limits, pauses and `close`: 5 ms of work


class Bounds(NamedTuple):
    """Memory shall reach to byte `least` of the region, and to `most` at most."""

    least: int
    most: int


class Populator:
    """Keeps the first `end` bytes of a region committed, within bounds that change.

    Guarantees: `run`, on one thread, is all that commits and gives back memory. `end` grows after memory was taken
    and falls before it is given back: what lies below it is there. No error ends the thread; `fail` is told, and
    has to lower `least`.

    `state` is the owner's lock; it guards `end`, is notified when that grows, and is held for calls of `bounds`
    (None: the region closes). `admit` is called before memory of a size is taken and may raise `PinError`.
    """

    def __init__(
        self,
        region: HostRegion,
        state: threading.Condition,
        bounds: Callable[[], Bounds | None],
        admit: Callable[[int], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.end = 0
        self._region, self._state = region, state
        self._bounds, self._admit, self._fail = bounds, admit, fail

    def run(self) -> None:
        while (step := self._wait_for_step()) is not None:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the owner logs and reports it
                self._fail(error)

    def _wait_for_step(self) -> Callable[[], None] | None:
        with self._state:
            self._state.wait_for(lambda: self._bounds() is None or self._next_step() is not None)
            return self._next_step()

    def _next_step(self) -> Callable[[], None] | None:
        bounds = self._bounds()
        if bounds is None:
            return None
        if self.end > bounds.most:
            return self._trim
        return partial(self._extend, min(bounds.least, self.end + _PIECE_BYTES)) if self.end < bounds.least else None

    def _extend(self, end: int) -> None:
        self._admit(end - self.end)
        self._region.commit(self.end, end - self.end)
        with self._state:
            self.end = end
            self._state.notify_all()

    def _trim(self) -> None:
        with self._state:
            bounds, before = self._bounds(), self.end
            if bounds is None or before <= bounds.most:
                return
            self.end = bounds.most
        self._region.decommit(self.end, before - self.end)
