"""What the doctor knows besides the engine's own figures: the memory of the host, and the clocks of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Memory of the machine that serves the API. Sizes in bytes; None or empty if a figure cannot be measured.

    `headroom_bytes` can be used before `limit`, a text that names the limit, is reached. `reserve_bytes` of them are
    kept for the rest of the process. `huge_pages`: the kernel's setting for transparent huge pages (always, madvise,
    never), or `reserved` if the pools use reserved huge pages, to which these figures then apply.
    """

    headroom_bytes: int | None
    limit: str
    reserve_bytes: int
    huge_pages: str


class OrphanedMemory(NamedTuple):
    """Memory of a node service that is taken although no service uses it. `words` say who has it and what to do.
    `num_bytes`: without what was counted for another process."""

    words: str
    num_bytes: int


class RankClocks:
    """Differences between the ranks' clocks and the server's, from their last reports. Used on the event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._offsets: dict[int, float] = {}

    def note(self, rank: int, sent: str | None) -> None:
        """Record the time that rank `rank` sent, in seconds since the epoch. Ignores what is not a finite number."""
        try:
            moment = float(sent or "")
        except ValueError:
            return
        if abs(moment) < float("inf"):
            self._offsets[rank] = moment - self._now()

    def offsets(self) -> Mapping[int, float]:
        """Seconds by which each rank's clock is ahead of the server's, less the time that its report took."""
        return dict(self._offsets)
