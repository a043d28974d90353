"""Present figures of pools and sessions, and the curves of the status page and of `kvstow top`.

The server samples the counters every second. A figure compares two samples: for a point of a curve two neighbours, and
for a present value the ends of the last ten seconds. Figures of a pool are defined only in `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from kvstow.stats import EngineStats
from kvstow.status import RankStatus, SessionStatus

NOW_SECONDS = 10.0
"""The period that present figures cover, in seconds."""
CURVE_INTERVAL = 5.0
"""The time between two points of a curve, in seconds."""
CURVE_POINTS = 60


class Sample(NamedTuple):
    """The counters of a pool at a time on a monotonic clock."""

    time: float
    stats: EngineStats


class SessionSample(NamedTuple):
    """What a session's ranks have copied, at a time on a monotonic clock, in bytes of one rank. All ranks copy the same
    blocks."""

    time: float
    load_bytes: int
    store_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NowView:
    """Figures of the last `seconds`, which are at most 10.

    `hit_ratio` is the number of blocks found per block looked up, and null if none was looked up. Bytes per second are
    of one rank. `evicted_blocks_per_second` counts blocks evicted for capacity, and not those that an operator, a
    purge, a resize or a failure has removed. `dropped_blocks_per_second` counts blocks that were offered and not stored
    (outcomes `dropped_...`). Rates are null until there are two samples."""

    seconds: float
    hit_ratio: float | None = None
    load_bytes_per_second: float | None = None
    store_bytes_per_second: float | None = None
    evicted_blocks_per_second: float | None = None
    dropped_blocks_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineView:
    """The most important figures of one pool, or of all pools together.

    `hit_ratio` and the bytes per second are of the last 10 seconds, and null until they are known. `hit_ratio` is the
    number of blocks found per block looked up, and bytes are those of one rank. `hit_ratio_ever` counts since the pools
    were made. `used_ratio` is the share of the usable memory that is not free. `gpu_seconds_saved` is the time, summed
    over all ranks, that hits have saved since the pools were made: see `PrefillStats`. `gpu_seconds_saved_per_hour` is
    the same at the pace of the last five minutes. `first_token_seconds_saved` is how much earlier first tokens came in
    these five minutes: the seconds saved on one rank for each load. These three are null before an engine knows what
    prompts cost."""

    hit_ratio: float | None
    hit_ratio_ever: float | None
    used_ratio: float | None
    load_bytes_per_second: float | None
    store_bytes_per_second: float | None
    gpu_seconds_saved: float | None
    gpu_seconds_saved_per_hour: float | None
    first_token_seconds_saved: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesView:
    """Figures of one pool over time. `points` has lists by the names of figures in `NowView`. The points are
    `interval_seconds` apart, with the oldest first, and null where the figure has no value. Bytes per second are of one
    rank."""

    pool: str
    interval_seconds: float
    points: dict[str, list[float | None]]


class PoolHistory(NamedTuple):
    """Samples of a pool: `recent` ones of the last `NOW_SECONDS`, and `kept` ones that are `CURVE_INTERVAL` apart.
    `total_slot_bytes` is the size of a slot on all ranks together."""

    num_ranks: int
    total_slot_bytes: int
    recent: Sequence[Sample]
    kept: Sequence[Sample]


def sample_session(ranks: Sequence[RankStatus], time: float) -> SessionSample | None:
    """Sample a session. Returns None until every rank has reported, because a rank that is older than the server
    reports what it has copied in its whole life."""
    if not ranks or any(rank.boot_id is None for rank in ranks):
        return None
    loaded = max(rank.load_bytes_total for rank in ranks)
    return SessionSample(time, loaded, max(rank.store_bytes_total for rank in ranks))


def curves_of(pool: str, kept: Sequence[Sample]) -> CurvesView:
    """Make the curves of samples that are `CURVE_INTERVAL` apart."""
    return CurvesView(
        pool=pool,
        interval_seconds=CURVE_INTERVAL,
        points={name: [FIGURES[name](before, after) for before, after in pairwise(kept)] for name in CURVES},
    )


def now_of(samples: Sequence[Sample]) -> NowView:
    if not samples:
        return NowView(seconds=0.0)
    first, last = ends_of_now(samples)
    return NowView(seconds=last.time - first.time, **{name: figure(first, last) for name, figure in FIGURES.items()})


def session_now(session: SessionStatus, samples: Sequence[SessionSample]) -> SessionStatus:
    if not samples:
        return session
    first, last = ends_of_now(samples)
    seconds = last.time - first.time
    return replace(
        session,
        load_bytes_per_second=_rate(first.load_bytes, last.load_bytes, seconds),
        store_bytes_per_second=_rate(first.store_bytes, last.store_bytes, seconds),
    )


_Sample = TypeVar("_Sample", Sample, SessionSample)


def ends_of_now(samples: Sequence[_Sample]) -> tuple[_Sample, _Sample]:
    last = samples[-1]
    return next(one for one in samples if last.time - one.time <= NOW_SECONDS), last


def _growth(before: int, after: int) -> int | None:
    """Return the growth of a counter. None if it shrank, because the server or the rank was restarted in between."""
    return after - before if after >= before else None


def _rate(before: int, after: int, seconds: float) -> float | None:
    growth = _growth(before, after)
    return None if growth is None or seconds <= 0 else growth / seconds


def _per_second(counter: Callable[[EngineStats], int]) -> Callable[[Sample, Sample], float | None]:
    return lambda before, after: _rate(counter(before.stats), counter(after.stats), after.time - before.time)


def _hit_ratio(before: Sample, after: Sample) -> float | None:
    first, last = before.stats.lookups, after.stats.lookups
    queries, hits = _growth(first.query_blocks, last.query_blocks), _growth(first.hit_blocks, last.hit_blocks)
    return hits / queries if queries and hits is not None else None


FIGURES: Mapping[str, Callable[[Sample, Sample], float | None]] = {
    "hit_ratio": _hit_ratio,
    "load_bytes_per_second": _per_second(lambda stats: stats.transfers.load.bytes),
    "store_bytes_per_second": _per_second(lambda stats: stats.transfers.store.bytes),
    "evicted_blocks_per_second": _per_second(lambda stats: stats.evicted_for_capacity),
    "dropped_blocks_per_second": _per_second(lambda stats: stats.dropped_blocks),
}
"""Functions that compute figures from two samples, and return None if there is no value. Their names are fields of
`NowView`, which describes them."""
CURVES = ("hit_ratio", "load_bytes_per_second", "store_bytes_per_second")
"""The figures that the page and `kvstow top` draw over time."""


def headline_of(pools: Sequence[PoolHistory]) -> HeadlineView:
    sampled = [pool for pool in pools if pool.recent]
    ends = [ends_of_now(pool.recent) for pool in sampled]
    queries, hits = (sum(_grown(ends, name)) for name in ("query_blocks", "hit_blocks"))
    latest = [(pool, last.stats) for pool, (_, last) in zip(sampled, ends, strict=True)]
    ever_queried = sum(stats.lookups.query_blocks for _, stats in latest)
    ever_hit = sum(stats.lookups.hit_blocks for _, stats in latest)
    usable = sum(stats.pool.usable_slots * pool.total_slot_bytes for pool, stats in latest)
    free = sum(stats.pool.slots.free * pool.total_slot_bytes for pool, stats in latest)
    is_known = any(stats.prefill.hit_tokens for _, stats in latest)
    return HeadlineView(
        hit_ratio=hits / queries if queries else None,
        hit_ratio_ever=ever_hit / ever_queried if ever_queried else None,
        used_ratio=(usable - free) / usable if usable else None,
        load_bytes_per_second=_sum_of(FIGURES["load_bytes_per_second"](*one) for one in ends),
        store_bytes_per_second=_sum_of(FIGURES["store_bytes_per_second"](*one) for one in ends),
        gpu_seconds_saved=sum(pool.num_ranks * stats.prefill.seconds_saved for pool, stats in latest)
        if is_known
        else None,
        gpu_seconds_saved_per_hour=_sum_of(_times(pool.num_ranks, saved_per_hour(pool.kept)) for pool in sampled),
        first_token_seconds_saved=_saved_per_load(sampled) if is_known else None,
    )


def _grown(ends: Sequence[tuple[Sample, Sample]], counter: str) -> list[int]:
    """Return the growth of a counter of lookups in each pair. It is 0 if the pool was made anew in between."""
    pairs = ((getattr(first.stats.lookups, counter), getattr(last.stats.lookups, counter)) for first, last in ends)
    return [_growth(*pair) or 0 for pair in pairs]


def _sum_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _times(factor: int, value: float | None) -> float | None:
    return None if value is None else factor * value


def _saved_per_load(pools: Sequence[PoolHistory]) -> float | None:
    ends = [(pool.kept[0].stats, pool.kept[-1].stats) for pool in pools if pool.kept]
    loads = sum(_growth(sum(a.transfers.choices.values()), sum(b.transfers.choices.values())) or 0 for a, b in ends)
    saved = sum(max(0.0, b.prefill.seconds_saved - a.prefill.seconds_saved) for a, b in ends)
    return saved / loads if loads else None


def saved_per_hour(samples: Sequence[Sample]) -> float | None:
    """Return how many seconds of prefill hits save in an hour, at the pace of these samples. None if unknown."""
    if len(samples) < 2 or not samples[-1].stats.prefill.hit_tokens:
        return None
    first, last = samples[0], samples[-1]
    seconds = last.time - first.time
    growth = last.stats.prefill.seconds_saved - first.stats.prefill.seconds_saved
    return 3600 * growth / seconds if seconds > 0 and growth >= 0 else None


def seconds_per_ratio(samples: Sequence[Sample]) -> float | None:
    """Return how many seconds of prefill would be saved in a minute if all looked-up blocks hit, at the pace of these
    samples. None if unknown."""
    if len(samples) < 2 or not samples[-1].stats.prefill.hit_tokens:
        return None
    first, last = samples[0], samples[-1]
    queried = _rate(first.stats.lookups.query_blocks, last.stats.lookups.query_blocks, last.time - first.time)
    if not queried or last.stats.block_tokens is None:
        return None
    prefill = last.stats.prefill
    return 60 * queried * last.stats.block_tokens * prefill.seconds_saved / prefill.hit_tokens
