"""The lag of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from kvstow.stats import Histogram

_INTERVAL = 0.25
_WINDOW = 20  # samples: a probe right after a stall still sees the worst lag of the last 5 s
_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class LoopMonitor:
    """Measures how late the running event loop wakes its tasks. Used on that loop."""

    def __init__(self, allowed: float = 1.0) -> None:
        self._allowed = allowed
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._histogram = Histogram(_BOUNDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvstow-loop-lag")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def record(self, lag: float) -> None:
        self._recent.append(lag)
        self._histogram.observe(lag)

    def failure(self) -> str | None:
        """Why the check `loop` fails; None if it passes."""
        if self._task is not None and self._task.done():
            return "the measurement of the event loop has stopped"
        worst = max(self._recent, default=0.0)
        if worst > self._allowed:
            return f"the event loop lagged by {worst:.2f} s in the last 5 s (allowed: {self._allowed:g} s)"
        return None

    def snapshot(self) -> Histogram:
        return self._histogram.copy()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self.record(max(0.0, loop.time() - due))
