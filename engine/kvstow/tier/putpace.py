"""How many blocks a store is given at a time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf


class PutPace:
    """Blocks that may be put now. Not locked.

    What was not used is kept, up to the blocks of one second. So in no second is more than twice the rate put.
    """

    def __init__(self, blocks_per_second: float, clock: Callable[[], float]) -> None:
        """`blocks_per_second`: `inf` for no limit."""
        self._rate, self._clock = blocks_per_second, clock
        self._most = max(1.0, blocks_per_second)
        self._allowed, self._at = self._most, clock()

    @property
    def allowed(self) -> float:
        """Blocks that may be put now; `inf` without a limit."""
        if self._rate == inf:
            return inf
        now = self._clock()
        self._allowed = min(self._most, self._allowed + self._rate * (now - self._at))
        self._at = now
        return self._allowed // 1

    def spend(self, blocks: int) -> None:
        """So many blocks were put, all of which were allowed."""
        if self._rate != inf:
            self._allowed -= blocks
