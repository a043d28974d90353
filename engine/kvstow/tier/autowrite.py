"""Whether a tier's store is large enough for every block to be put there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from kvstow.bytesize import format_size

WINDOW_SECONDS = 600.0
"""Nine of ten uses of a block come within so long after the one before, in a trace of conversations."""
_ENOUGH = 1.25
"""All blocks are put again when the store holds so many times the window."""
_MINUTE = 60.0


class AutoWrite:
    """Chooses between `through` and `selective`, from how long the store would hold a block if all new ones were put.
    Not locked: one thread uses it.

    With hysteresis: a store near the limit does not change its mode every minute. New blocks are counted for a minute
    before the first decision, and for ten minutes later on.
    """

    def __init__(self, capacity_bytes: int | None, block_bytes: int, clock: Callable[[], float]) -> None:
        """`capacity_bytes`: of the store, for this node alone; None: not known. `block_bytes`: of a block on all
        ranks."""
        self._capacity, self._block_bytes, self._clock = capacity_bytes, block_bytes, clock
        self._minutes: deque[tuple[float, int]] = deque()  # when each began, and its new blocks
        self.mode: Literal["through", "selective"] = "through"
        self.reason = "all blocks are put: new blocks are being counted"
        if capacity_bytes is None:
            self.reason = "all blocks are put: the URL of the store does not say how much it holds"

    def note_new(self, blocks: int) -> None:
        """So many blocks were computed. Call it with 0 too, so that time passes."""
        if self._capacity is None:
            return
        now = self._clock()
        if not self._minutes or now >= self._minutes[-1][0] + _MINUTE:
            self._decide(self._capacity, now)
            self._minutes.append((now, 0))
        began, count = self._minutes.pop()
        self._minutes.append((began, count + blocks))

    def _decide(self, capacity: int, now: float) -> None:
        while self._minutes and self._minutes[0][0] < now - WINDOW_SECONDS:
            self._minutes.popleft()
        num_bytes = self._block_bytes * sum(count for _, count in self._minutes)
        if not num_bytes:
            return
        rate = num_bytes / (now - self._minutes[0][0])
        held = capacity / rate
        self.mode = "through" if held >= WINDOW_SECONDS * (1 if self.mode == "through" else _ENOUGH) else "selective"
        which = "all blocks are put" if self.mode == "through" else "blocks are put at their second use"
        self.reason = (
            f"{which}: the store holds the new blocks of {held:.0f} s ({format_size(rate)} a second), "
            f"and {WINDOW_SECONDS:.0f} s are wanted"
        )
