"""What `kvstow top` shows: the server at one moment, and how its counters moved just before."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstow_api.views.history import SampleView
from kvstow_api.views.info import InfoView
from kvstow_api.views.ranks import ReadinessView
from kvstow_api.views.stats import StatsView
from kvstow_api.views.transfers import TransferView
from kvstow_api.words import Switch, switched

if TYPE_CHECKING:
    from kvstow_api.client import Client

_WINDOW_SECONDS = 10.0
_OLDEST = 4


@dataclass(frozen=True, slots=True)
class Movement:
    """What the counters did in the last seconds, each second; bytes are of one rank."""

    hit_ratio: float | None = None
    load_bytes: float = 0.0
    store_bytes: float = 0.0
    evicted_blocks: float = 0.0
    dropped_blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    info: InfoView
    readiness: ReadinessView
    switches: tuple[Switch, ...]
    stats: StatsView
    oldest: tuple[TransferView, ...]
    history: tuple[SampleView, ...]
    movement: Movement


@dataclass(frozen=True, slots=True)
class _Counters:
    time: float
    queries: int
    hits: int
    load_bytes: int
    store_bytes: int
    evicted: int
    dropped: int

    @classmethod
    def of(cls, stats: StatsView) -> _Counters:
        lookups, transfers = stats.lookups, stats.transfers
        assert lookups is not None
        assert transfers is not None
        return cls(
            time=time.monotonic(),
            queries=lookups.query_blocks,
            hits=lookups.hit_blocks,
            load_bytes=transfers.load.bytes,
            store_bytes=transfers.store.bytes,
            evicted=sum((stats.evictions or {}).values()),
            dropped=sum(n for outcome, n in (stats.stores or {}).items() if outcome.startswith("dropped")),
        )


class Watcher:
    """Looks at one server again and again. Not thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: deque[_Counters] = deque()
        self._engine_id = ""

    def look(self) -> Snapshot:
        """Raises `ApiError` where the server does not answer."""
        from kvstow_api.client import calls

        send = self._client.send
        info, stats = send(calls.info()), send(calls.stats())
        paused = send(calls.pool()).pinning_paused
        return Snapshot(
            info=info,
            readiness=send(calls.readiness()),
            switches=tuple(switched(send(calls.drain_status()), send(calls.bypass_status()), pinning_paused=paused)),
            stats=stats,
            oldest=tuple(send(calls.transfers(slowest=_OLDEST)).items),
            history=tuple(send(calls.history()).items),
            movement=self._move(info.engine_id, _Counters.of(stats)),
        )

    def _move(self, engine_id: str, now: _Counters) -> Movement:
        """Since the oldest look of the last seconds; a new engine begins anew."""
        if engine_id != self._engine_id:
            self._seen.clear()
            self._engine_id = engine_id
        self._seen.append(now)
        while len(self._seen) > 2 and now.time - self._seen[0].time > _WINDOW_SECONDS:
            self._seen.popleft()
        then = self._seen[0]
        seconds = now.time - then.time
        if not seconds:
            return Movement()
        queries = now.queries - then.queries
        return Movement(
            hit_ratio=(now.hits - then.hits) / queries if queries else None,
            load_bytes=(now.load_bytes - then.load_bytes) / seconds,
            store_bytes=(now.store_bytes - then.store_bytes) / seconds,
            evicted_blocks=(now.evicted - then.evicted) / seconds,
            dropped_blocks=(now.dropped - then.dropped) / seconds,
        )
