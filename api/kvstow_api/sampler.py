"""Samples the pools once a second: counters for figures and curves, and changes of state for the journal. It also adds
up the counters of ranks over all engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstow.status import RankStatus, SessionState, SessionStatus
from kvstow_api.answers import EventType, PoolCurveView
from kvstow_api.directory import Directory, HostedPool, host_readiness
from kvstow_api.figures import (
    CURVE_INTERVAL,
    CURVE_POINTS,
    NOW_SECONDS,
    Sample,
    SessionSample,
    sample_session,
    session_now,
)
from kvstow_api.journal import Journal
from kvstow_api.texts import event_words

_BOOTS = 1024  # how many boots of ranks are remembered for each pool


def _busy(rank: RankStatus) -> Counter[str]:
    return Counter({"load": rank.load_busy_seconds, "store": rank.store_busy_seconds})


class RankCounters:
    """Sums of the counters of ranks, by pool and rank number. They never shrink while the pool lives: a rank counts
    from zero when it restarts, but its former boot stays in the sum.

    If an engine attaches again with the boots and counters that it had, they are not added twice. The sums lack what a
    rank copies before its first `note`, and between its last `note` and its end. Used on the event loop. O(ranks).
    """

    def __init__(self) -> None:
        self._pools: dict[str, _PoolCounters] = {}

    def note(self, pools: Sequence[HostedPool], sessions: Iterable[SessionStatus]) -> None:
        """Add what the ranks have counted since the last call. Pools that have ended are forgotten."""
        ids = {pool.name: pool.facade.engine_id for pool in pools}
        self._pools = {one: self._pools.get(one) or _PoolCounters() for one in ids.values()}
        for session in sessions:
            if session.pool in ids:
                for rank in session.ranks:
                    self._pools[ids[session.pool]].note(rank)

    def of_pool(self, pool: HostedPool) -> list[Mapping[str, float]]:
        """Return sums by rank number: the seconds in which the rank was copying (`load` and `store`), and its failures
        to pin, by reason."""
        counters = self._pools.get(pool.facade.engine_id) or _PoolCounters()
        return [counters.sums.get(rank, Counter()) for rank in range(pool.facade.config.num_ranks)]


class _PoolCounters:
    def __init__(self) -> None:
        self.sums: dict[int, Counter[str]] = {}
        self._boots: OrderedDict[tuple[int, str], Counter[str]] = OrderedDict()
        """The last counters of each boot of a rank. The boot that was seen last is at the end."""

    def note(self, rank: RankStatus) -> None:
        if rank.boot_id is None:
            return
        name, now = (rank.rank, rank.boot_id), _busy(rank) + Counter(rank.pin_failures)
        # A rank that is older than this server reports what it has copied in its whole life.
        before = self._boots.get(name, _busy(rank))
        self.sums[rank.rank] = self.sums.get(rank.rank, Counter()) + (now - before)  # `-` drops negative counts
        self._boots[name] = now
        self._boots.move_to_end(name)
        while len(self._boots) > _BOOTS:
            self._boots.popitem(last=False)


logger = logging.getLogger("kvstow.api")

_INTERVAL = 1.0
_TICKS_PER_POINT = round(CURVE_INTERVAL / _INTERVAL)
REJECTED_SECONDS = 600.0
"""How long a refusal of an engine counts as a condition, in seconds."""
CORRUPT_SECONDS = 86_400.0
"""How long blocks of a store that were not what was written count as a condition, in seconds. If it lasted, only a
restart would end it, which may cost the cache."""
_SAMPLES = 60
"""How many counts of each period are kept."""
_STATES: Mapping[SessionState, str] = {
    "attaching": "not all ranks have reported and registered slots",
    "attached": "it loads and stores",
    "stuck": "a transfer is too old",
    "lost": "its connection has ended, and processes of it may still reach the memory",
}


_OVER: Mapping[EventType, Mapping[str, str | None]] = {
    "session": {"state": "over", "reason": "none of its processes can reach the memory"},
    "tier": {"store": None, "state": "over", "reason": "no engine can use the namespace any more"},
}
"""The data of the last event of a thing that has ended. Things of other types end without an event."""
_Key = tuple[EventType, *tuple[Any, ...]]


class _Lately:
    """What counters have counted within a period. Used on the event loop."""

    def __init__(self, seconds: float) -> None:
        self._ticks_per_sample = max(1, round(seconds / _INTERVAL / _SAMPLES))
        self._samples = deque[Mapping[str, int]](maxlen=_SAMPLES)

    def note(self, tick: int, counts: Callable[[], Mapping[str, int]]) -> None:
        if tick % self._ticks_per_sample == 0:
            self._samples.append(counts())

    def counted(self, now: Mapping[str, int]) -> Mapping[str, int]:
        before = self._samples[0] if self._samples else {}
        return {name: count - before.get(name, 0) for name, count in now.items()}


class Sampler:
    """Takes samples, and adds events to the journal. Runs on the event loop. A sample is O(pools + ranks + namespaces
    with a tier)."""

    def __init__(self, directory: Directory, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self._pools: dict[str, PoolSamples] = {}
        self._sessions: dict[str, deque[SessionSample]] = {}
        self._noted: dict[_Key, dict[str, Any]] = {}
        """The last event of each thing that has a state."""
        self.rank_counters = RankCounters()
        self._rejected, self._corrupt = _Lately(REJECTED_SECONDS), _Lately(CORRUPT_SECONDS)
        self._ticks = 0

    def of_pool(self, pool: str) -> PoolSamples:
        return self._pools.get(pool) or PoolSamples("")

    def rejected_lately(self) -> Mapping[str, int]:
        return self._rejected.counted(self._directory.rejected)

    def corrupt_lately(self) -> Mapping[str, int]:
        """Return how many blocks of each part of the store below the pools were not what was written."""
        return self._corrupt.counted(self._corrupt_blocks())

    def _corrupt_blocks(self) -> dict[str, int]:
        tier = self._directory.tier
        return {} if tier is None else {part.name: part.counters.corrupt_blocks for part in tier.parts()}

    def now_of_session(self, session: SessionStatus) -> SessionStatus:
        return session_now(session, self._sessions.get(session.id, ()))

    def tick(self) -> None:
        """Take a sample of each pool and each session, and note changes. Every fifth sample, from the first one on, is
        also a point of the curves, which end with their pool."""
        directory = self._directory
        if directory.is_node:
            self._rejected.note(self._ticks, lambda: dict(directory.rejected))
            self._corrupt.note(self._ticks, self._corrupt_blocks)
        self._ticks += 1
        pools, sessions = directory.pools(), directory.sessions()
        self.rank_counters.note(pools, sessions)
        self._pools = {pool.name: self._sample(pool) for pool in pools}
        self._sessions = {session.id: self._sample_session(session) for session in sessions}
        before, self._noted = self._noted, {}
        for key, data in self._states(pools, sessions):
            last = before.pop(key, None)
            if last is not None and (_what(last) == _what(data) or self._is_growth(key, last, data)):
                self._noted[key] = last
            else:
                self._noted[key] = data
                self._note(key[0], data)
        for key, last in before.items():
            if key[0] in _OVER:
                self._note(key[0], {**last, **_OVER[key[0]]})

    def _states(
        self, pools: Sequence[HostedPool], sessions: Sequence[SessionStatus]
    ) -> Iterator[tuple[_Key, dict[str, Any]]]:
        if self._directory.is_node:
            node = host_readiness(self._directory)
            yield ("state", None), {"pool": None, "state": node.state, "reason": node.reason}
        for pool in pools:
            found = pool.facade.readiness()
            data = {"pool": pool.name, "state": found.state, "reason": found.reason}
            yield ("state", pool.facade.engine_id), data
        for one in sessions:
            names = {"pool": one.pool, "session": one.id}
            details = {"engine": one.engine, "model": one.model, "state": one.state, "reason": _STATES[one.state]}
            yield ("session", one.id), {**names, **details}
            for rank in one.ranks if one.state != "lost" else ():
                figures = {"rank": rank.rank, "state": rank.state, "boot_id": rank.boot_id, "error": rank.error}
                yield ("rank", one.id, rank.rank), {**names, **figures}
        for tier in self._directory.tier.tiers() if self._directory.tier is not None else ():
            where = {"pool": tier.pool, "namespace": tier.namespace, "store": tier.store}
            yield ("tier", tier.pool, tier.namespace), {**where, "state": tier.state, "reason": tier.reason}

    def _is_growth(self, key: _Key, last: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        """Whether the only change is that a pool of a node, or a rank, has more memory. This happens with every row, so
        it is not an event."""
        states = (last["state"], data["state"])
        grows = self._directory.is_node and data["pool"] is not None and states == ("ready", "pinning")
        return grows and key[0] in ("state", "rank") and _what(last)[1:] == _what(data)[1:]

    def _note(self, kind: EventType, data: dict[str, Any]) -> None:
        if kind in ("state", "session"):
            logger.log(_level(data), "%s", event_words(kind, data))
        self._journal.add(kind, **data)

    def _sample(self, pool: HostedPool) -> PoolSamples:
        samples, facade = self._pools.get(pool.name), pool.facade
        if samples is None or samples.engine_id != facade.engine_id:
            samples = PoolSamples(facade.engine_id)
        samples.add(Sample(time.monotonic(), facade.stats()))
        return samples

    def _sample_session(self, session: SessionStatus) -> deque[SessionSample]:
        samples = self._sessions.get(session.id) or deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)
        sample = sample_session(session.ranks, time.monotonic())
        if sample is not None:
            samples.append(sample)
        return samples

    async def run(self) -> None:
        await keep_calling(self.tick, _INTERVAL, logger, "sampling the pools failed")


async def keep_calling(function: Callable[[], object], seconds: float, log: logging.Logger, failure: str) -> None:
    """Call a function, and again each time after a pause of `seconds`. If it raises, the next call may succeed. The
    first of several failures in succession is logged, as `failure`."""
    is_failing = False
    while True:
        try:
            function()
            is_failing = False
        except Exception:
            if not is_failing:
                log.exception(failure)
            is_failing = True
        await asyncio.sleep(seconds)


_BAD_STATES = frozenset({"degraded", "stopped", "stuck", "lost"})


def _level(data: Mapping[str, Any]) -> int:
    return logging.WARNING if data["state"] in _BAD_STATES else logging.INFO


def _what(data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values whose changes are events."""
    return data["state"], data.get("boot_id"), data.get("error")


STEP = 0.02
"""The statement about a pool's size is made again when one of its figures has changed by this much."""
SECONDS = 600.0
"""It is also made again after this time, in seconds."""


class CurveKey(NamedTuple):
    """The settings of a pool that a statement about its size depends on."""

    policy: str
    num_slots: int
    num_bytes: int


class CurveStatement(NamedTuple):
    """A statement about the size of a pool, the figures that it rests on, and the time when it was made."""

    view: PoolCurveView
    key: CurveKey
    figures: Sequence[float]
    time: float

    def is_outdated(self, key: CurveKey, figures: Sequence[float], now: float) -> bool:
        """Whether these settings or figures, or the time, call for a new statement."""
        is_other = key != self.key or len(figures) != len(self.figures) or now - self.time >= SECONDS
        return is_other or any(abs(one - other) >= STEP for one, other in zip(figures, self.figures, strict=True))


class PoolSamples:
    """The samples of a pool, from its beginning to its end, and the last statement about its size."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.kept: deque[Sample] = deque(maxlen=CURVE_POINTS + 1)
        self.recent: deque[Sample] = deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)
        self.statement: CurveStatement | None = None
        self._ticks = 0

    @property
    def now(self) -> float:
        """When the last sample was taken."""
        return self.recent[-1].time if self.recent else 0.0

    def add(self, sample: Sample) -> None:
        self.recent.append(sample)
        if self._ticks % _TICKS_PER_POINT == 0:
            self.kept.append(sample)
        self._ticks += 1
