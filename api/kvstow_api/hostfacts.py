"""What a host measures of its machine, for the doctor; and what the server measures of the ranks' clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class VLLMProcess(NamedTuple):
    """Of the process that serves the API. Sizes in bytes; None or empty where a fact cannot be had.

    `headroom_bytes` may still be taken before `limit`, named in words, is reached; `reserve_bytes` of it are left to
    the rest of the process. `huge_pages`: the kernel's word on transparent huge pages (always, madvise, never), or
    `reserved`: the pools lie in reserved huge pages, whose limits these are.
    """

    headroom_bytes: int | None
    limit: str
    reserve_bytes: int
    huge_pages: str


class RankClocks:
    """How far the ranks' clocks are from the server's, as their last reports had it. On the event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._offsets: dict[int, float] = {}

    def note(self, rank: int, told: str | None) -> None:
        """Take the time that rank `rank` told; what is none changes nothing."""
        try:
            moment = float(told or "")
        except ValueError:
            return
        if abs(moment) < float("inf"):
            self._offsets[rank] = moment - self._now()

    def offsets(self) -> Mapping[int, float]:
        """Seconds that each rank's clock is ahead of the server's; the time a report takes counts against it."""
        return dict(self._offsets)
