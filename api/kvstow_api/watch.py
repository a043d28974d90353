"""What changes by itself: looked at once a second, for the journal and the history."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime

from kvstow.control.engine import OffloadEngine
from kvstow.stats import RankStatus
from kvstow_api.journal import Journal
from kvstow_api.series import now_of
from kvstow_api.views.history import NOW_SECONDS, HistoryView, SampleView

logger = logging.getLogger("kvstow.api")

_INTERVAL = 1.0
_TICKS_PER_SAMPLE = 5  # of the history
_SAMPLES = 720  # an hour


class Watch:
    """Notes changes of the engine's and the ranks' states, and samples the counters. On the event loop; O(ranks)."""

    def __init__(self, engine: OffloadEngine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal
        self._samples: deque[SampleView] = deque(maxlen=_SAMPLES)
        self._recent: deque[SampleView] = deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)
        self._state: str | None = None
        self._ranks: dict[int, tuple[str, str | None, str | None]] = {}
        self._ticks = 0
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvstow-watch")

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
            self._look_at(rank)
        self._recent.append(_sample(self._engine, readiness.ranks))
        if self._ticks % _TICKS_PER_SAMPLE == 0:
            self._samples.append(self._recent[-1])
        self._ticks += 1

    def _look_at(self, rank: RankStatus) -> None:
        now = (rank.state, rank.boot_id, rank.error)
        if self._ranks.get(rank.rank) != now:
            self._ranks[rank.rank] = now
            self._journal.add("rank", rank=rank.rank, state=rank.state, boot_id=rank.boot_id, error=rank.error)

    async def _run(self) -> None:
        while True:
            try:
                self.tick()
                self._failing = False
            except Exception:  # the next look may succeed
                if not self._failing:
                    logger.exception("the watch over the engine failed")
                self._failing = True
            await asyncio.sleep(_INTERVAL)


def _sample(engine: OffloadEngine, ranks: tuple[RankStatus, ...]) -> SampleView:
    stats = engine.stats()
    return SampleView(
        time=datetime.now(UTC),
        query_blocks=stats.query_blocks,
        hit_blocks=stats.hit_blocks,
        stored_blocks=stats.store_blocks["stored"],
        dropped_blocks=stats.dropped_blocks,
        evicted_blocks=stats.evicted_for_room,
        load_bytes=stats.transfer_bytes["load"],
        store_bytes=stats.transfer_bytes["store"],
        used_slots=stats.usable_slots - stats.slots.free,
        usable_slots=stats.usable_slots,
        pinned_bytes=sum(rank.pinned_bytes for rank in ranks),
    )
