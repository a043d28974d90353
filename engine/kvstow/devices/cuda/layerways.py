"""Chooses how the bytes of loads by layer travel: by the kernel that reads host memory, or by the copy engine.

Hosts differ: on one the kernel reaches 0.93 of the copy engine's rate, on another 0.55 whatever its grid. So both are
measured, on the same number of bytes in the same memory, and compared only with each other, because a long load is
faster than a short one by either way.

At equal rates the kernel is the better way. It needs no kernel behind the copy, brings smaller pieces, and disturbs the
computation less: where it reached 0.91 of the copy engine's rate, a hit of 16,000 tokens with 2,048 new ones behind it
took 95 ms with the kernel and 104 with the copy engine. So the copy engine is taken only where the kernel is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstow.messages import SLOW_KERNEL, LayerFigures, LayerWay

_AGAIN = 60.0
"""Seconds from one trial of both ways to the next."""

_FASTER = 1.1
"""The kernel is taken again if its rate is this many times the limit at which it was given up. So rates near the limit
do not change the way every minute."""

_NEW = 0.2
"""The weight of a new load in the average rate of loads."""

_LEAST_BYTES = 16 << 20
"""Bytes of the smallest load whose rate counts."""


class WayRates:
    """The measured rates, and the way that follows from them. The thread that drives the device calls `tried` and
    `loaded`. The host's thread uses `way`, `is_due` and `trying`. Any thread may read `figures`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.way: LayerWay = "kernel"
        self._clock, self._tried_at = clock, float("-inf")
        self._tried: dict[LayerWay, float] = {}
        self._loads: dict[LayerWay, float] = {}

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next trial."""
        return self._clock() >= self._tried_at + _AGAIN

    def trying(self) -> None:
        self._tried_at = self._clock()

    def tried(self, kernel: float, engine: float) -> None:
        """Note the rates of a trial, in bytes a second, and choose the way."""
        self._tried = {"kernel": kernel, "engine": engine}
        if self.way == "kernel" and kernel < SLOW_KERNEL * engine:
            self.way = "engine"
        elif self.way == "engine" and kernel >= _FASTER * SLOW_KERNEL * engine:
            self.way = "kernel"

    def loaded(self, way: LayerWay, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            rate, before = num_bytes / seconds, self._loads.get(way)
            self._loads[way] = rate if before is None else before + _NEW * (rate - before)

    @property
    def figures(self) -> LayerFigures:
        """The way and the rates: those of the last trial, or those of loads if there are no trials, as the engine is
        never used then."""
        found = self._tried or self._loads
        return LayerFigures(
            layer_way=self.way,
            layer_kernel_bytes_per_second=found.get("kernel"),
            layer_engine_bytes_per_second=found.get("engine"),
        )
