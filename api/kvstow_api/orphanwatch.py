"""Looks now and then for memory that an earlier service has left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool

from kvstow_api.measurements import OrphanedMemory

logger = logging.getLogger("kvstow.api")

INTERVAL = 60.0
"""Seconds between two looks: each reads the files of all processes in /proc, on a thread."""


class OrphanWatch:
    """Runs on the event loop, and measures on a thread."""

    def __init__(self, measure: Callable[[], Sequence[OrphanedMemory]]) -> None:
        self.num_bytes: int | None = None
        """What the last look has found; None before the first one, and when it has failed."""
        self._measure = measure
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvstow-orphans")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def look(self) -> None:
        try:
            found = await run_in_threadpool(self._measure)
        except Exception:  # the next look may succeed
            if not self._failing:
                logger.exception("looking for orphaned memory failed")
            self._failing, self.num_bytes = True, None
        else:
            self._failing, self.num_bytes = False, sum(one.num_bytes for one in found)

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL)
