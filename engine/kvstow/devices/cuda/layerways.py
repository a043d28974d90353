"""Which way the bytes of a load by layer take: the kernel that reads host memory, or the copy engine.

Hosts differ: on one the kernel reaches 0.93 of the copy engine's rate, on another 0.55 whatever its grid. So both are
measured, on the same number of bytes in the same memory, and compared with each other alone: a long load is faster than
a short one by either way.

At equal rates the kernel is the better way. It needs no kernel behind the copy, brings smaller pieces, and disturbs the
computation less: where it reached 0.91 of the copy engine's rate, a hit of 16,000 tokens with 2,048 new ones behind it
took 95 ms with the kernel and 104 with the copy engine. So the copy engine is taken only where the kernel is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstow.messages import SLOW_KERNEL, LayerFigures, LayerWay

_AGAIN = 60.0  # seconds until both ways are tried again
_FASTER = 1.1  # what a way must be by to be taken again, so that rates near the limit do not change it every minute
_NEW = 0.2  # weight of a new load
_LEAST_BYTES = 16 << 20  # of a load that shows a rate


class WayRates:
    """Written by the thread that drives the device; `way` and `is_due` are read by the host's, `figures` by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.way: LayerWay = "kernel"
        self._clock, self._tried_at = clock, float("-inf")
        self._tried: dict[LayerWay, float] = {}
        self._loads: dict[LayerWay, float] = {}

    @property
    def is_due(self) -> bool:
        """Whether both ways are to be tried."""
        return self._clock() >= self._tried_at + _AGAIN

    def trying(self) -> None:
        self._tried_at = self._clock()

    def tried(self, kernel: float, engine: float) -> None:
        """So many bytes a second were brought by either way."""
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
        """As the last trial has found them, or as loads have where there is none: then the engine is never used."""
        found = self._tried or self._loads
        return LayerFigures(
            layer_way=self.way,
            layer_kernel_bytes_per_second=found.get("kernel"),
            layer_engine_bytes_per_second=found.get("engine"),
        )
