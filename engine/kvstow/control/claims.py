"""Claims: which blocks are expected to be used again, and when."""

from __future__ import annotations

from typing import NamedTuple


class Switch(NamedTuple):
    """Hints were switched off because the pool does better without them, or on again. The ratios of hits are over the
    same requests."""

    is_on: bool
    ratio_with: float
    ratio_without: float
    requests: int

    def __str__(self) -> str:
        return (
            f"hints are {'used again' if self.is_on else 'not used any more'}: over the last {self.requests:,} "
            f"requests, {self.ratio_with:.1%} of the blocks would have hit with them, {self.ratio_without:.1%} without"
        )
