"""Which way the bytes of a load by layer take: the kernel that reads host memory, or the copy engine.

Hosts differ: on one the kernel reaches 0.93 of the copy engine's rate, on another 0.55 whatever its grid. So both are
measured, on the same bytes and the same number of them, and compared with each other alone: a long load is faster than
a short one by either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

Way = Literal["kernel", "engine"]

_AGAIN = 60.0  # seconds until both ways are tried again
_FASTER = 1.1  # what the other way must be by to be taken instead
_NEW = 0.2  # weight of a new load
_LEAST_BYTES = 16 << 20  # of a load that shows a rate


class LayerRates(NamedTuple):
    """Bytes a second; None before it was measured, and for the engine where it cannot be used."""

    way: Way
    kernel: float | None
    engine: float | None


class WayRates:
    """Written by the thread that drives the device, `way` and `is_due` are read by the host's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.way: Way = "kernel"
        self._clock, self._tried_at = clock, float("-inf")
        self._tried: dict[Way, float] = {}
        self._loads: dict[Way, float] = {}

    @property
    def is_due(self) -> bool:
        """Whether both ways are to be tried."""
        return self._clock() >= self._tried_at + _AGAIN

    def trying(self) -> None:
        self._tried_at = self._clock()

    def tried(self, kernel: float, engine: float) -> None:
        """So many bytes a second were brought by either way."""
        self._tried = {"kernel": kernel, "engine": engine}
        other: Way = "engine" if self.way == "kernel" else "kernel"
        if self._tried[other] >= _FASTER * self._tried[self.way]:
            self.way = other

    def loaded(self, way: Way, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            rate, before = num_bytes / seconds, self._loads.get(way)
            self._loads[way] = rate if before is None else before + _NEW * (rate - before)

    @property
    def rates(self) -> LayerRates:
        """As the last trial has found them, or as loads have where there is none: then the engine is never used."""
        found = self._tried or self._loads
        return LayerRates(self.way, found.get("kernel"), found.get("engine"))
