"""Samples the engine once a second: counters for the history, changes of state for the journal."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from kvstow.control.poolfacade import PoolFacade
from kvstow.status import RankStatus
from kvstow_api.history import NOW_SECONDS, HistoryView, SampleView, now_of, sample_of
from kvstow_api.journal import Journal

logger = logging.getLogger("kvstow.api")

_INTERVAL = 1.0
_TICKS_PER_SAMPLE = 5  # of the history
_SAMPLES = 720  # an hour


class Sampler:
    """Runs on the event loop. A sample is O(ranks)."""

    def __init__(self, engine: PoolFacade, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._samples: deque[SampleView] = deque(maxlen=_SAMPLES)
        self._recent: deque[SampleView] = deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)
        self._state: str | None = None
        self._ranks: dict[int, tuple[str, str | None, str | None]] = {}
        self._ticks = 0
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvstow-sampler")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def history(self) -> HistoryView:
        return HistoryView(
            interval_seconds=_INTERVAL * _TICKS_PER_SAMPLE, now=now_of(self._recent), items=list(self._samples)
        )

    def tick(self) -> None:
        """Take a sample. The history keeps every fifth one, beginning with the first."""
        readiness = self._engine.readiness()
        if readiness.state != self._state:
            self._journal.add("state", state=readiness.state, reason=readiness.reason)
            self._state = readiness.state
        for rank in readiness.ranks:
            self._note_changes(rank)
        self._recent.append(sample_of(self._engine.stats(), readiness.ranks))
        if self._ticks % _TICKS_PER_SAMPLE == 0:
            self._samples.append(self._recent[-1])
        self._ticks += 1

    def _note_changes(self, rank: RankStatus) -> None:
        now = (rank.state, rank.boot_id, rank.error)
        if self._ranks.get(rank.rank) != now:
            self._ranks[rank.rank] = now
            self._journal.add("rank", rank=rank.rank, state=rank.state, boot_id=rank.boot_id, error=rank.error)

    async def _run(self) -> None:
        while True:
            try:
                self.tick()
                self._failing = False
            except Exception:  # the next sample may succeed
                if not self._failing:
                    logger.exception("sampling the engine failed")
                self._failing = True
            await asyncio.sleep(_INTERVAL)
