"""Figures over time: each is defined once, here, for the API, the status page, `kvstow top` and `kvstow plot`.

The server samples the counters. A figure compares two samples: neighbours in the history for a curve, the ends of the
last seconds for the present value. Standard library only: clients draw curves, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from kvstow.stats import EngineStats
from kvstow.status import RankStatus

NOW_SECONDS = 10.0
"""The period that current figures cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """Counters at one moment: they only grow, so a rate is the difference of two samples. `evicted_blocks` were
    evicted for capacity; `dropped_blocks` were offered and not stored. `load_bytes`, `store_bytes` and slots are of one
    rank, `pinned_bytes` of all: memory that several ranks have pinned counts once."""

    time: datetime
    query_blocks: int = 0
    hit_blocks: int = 0
    stored_blocks: int = 0
    dropped_blocks: int = 0
    evicted_blocks: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    used_slots: int = 0
    usable_slots: int = 0
    pinned_bytes: int = 0


def sample_of(stats: EngineStats, pinned_bytes: int) -> SampleView:
    """The sample of now."""
    return SampleView(
        time=datetime.now(UTC),
        query_blocks=stats.lookups.query_blocks,
        hit_blocks=stats.lookups.hit_blocks,
        stored_blocks=stats.stores["stored"],
        dropped_blocks=stats.dropped_blocks,
        evicted_blocks=stats.evicted_for_capacity,
        load_bytes=stats.transfers.load.bytes,
        store_bytes=stats.transfers.store.bytes,
        used_slots=stats.pool.usable_slots - stats.pool.slots.free,
        usable_slots=stats.pool.usable_slots,
        pinned_bytes=pinned_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NowView:
    """Figures of the last `seconds`, at most 10.

    `hit_ratio`: blocks found of the blocks looked up, null if there were none. Bytes per second are of one rank. Blocks
    per second: `stored`; `evicted` for capacity, so not those that an operator, a purge, a resize or a failure has
    removed; `dropped`, which were offered and not stored (outcomes `dropped_...`). `used_ratio`: usable slots that are
    not free. `pinned_bytes` is of all ranks; memory that several have pinned counts once. Rates are null until there
    are two samples."""

    seconds: float
    hit_ratio: float | None = None
    load_bytes_per_second: float | None = None
    store_bytes_per_second: float | None = None
    stored_blocks_per_second: float | None = None
    evicted_blocks_per_second: float | None = None
    dropped_blocks_per_second: float | None = None
    used_ratio: float | None = None
    pinned_bytes: float | None = None


class SessionSample(NamedTuple):
    """What a session's ranks have copied at one moment, in bytes of one rank: all ranks copy the same blocks."""

    time: datetime
    load_bytes: int
    store_bytes: int


def session_sample_of(ranks: Iterable[RankStatus]) -> SessionSample:
    """The sample of now."""
    copied = [(rank.load_bytes_total, rank.store_bytes_total) for rank in ranks] or [(0, 0)]
    return SessionSample(datetime.now(UTC), max(loaded for loaded, _ in copied), max(stored for _, stored in copied))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNowView:
    """Figures of an engine in the last `seconds`, at most 10. Bytes per second are of one rank; null until there are
    two samples."""

    seconds: float = 0.0
    load_bytes_per_second: float | None = None
    store_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """Of one pool; `pool` is null, and there are no items, while there is none. Oldest first, `interval_seconds`
    apart."""

    pool: str | None
    interval_seconds: float
    now: NowView
    items: list[SampleView]


_Sample = TypeVar("_Sample", SampleView, SessionSample)

Unit = Literal["ratio", "bytes", "bytes_per_second", "blocks_per_second"]

Figure = Callable[[SampleView, SampleView], float | None]
"""A figure of the time between two samples; None if it has no value."""


class Metric(NamedTuple):
    """One or more lines to draw, in one unit. `lines` maps their names to names of `FIGURES`."""

    unit: Unit
    lines: Mapping[str, str]


class Line(NamedTuple):
    """One figure over time; each point belongs to the interval that ends at its time. `figure`: its name."""

    name: str
    figure: str
    times: tuple[datetime, ...]
    points: tuple[float | None, ...]


def lines_of(metric: Metric, samples: Sequence[SampleView]) -> list[Line]:
    """The lines of `metric`, one point shorter than `samples`."""
    times = tuple(sample.time for sample in samples[1:])
    return [
        Line(name, figure, times, tuple(FIGURES[figure](before, after) for before, after in pairwise(samples)))
        for name, figure in metric.lines.items()
    ]


def now_of(samples: Sequence[SampleView]) -> NowView:
    """Every figure of the last `NOW_SECONDS`, or of all samples if they cover less."""
    if not samples:
        return NowView(seconds=0.0)
    first, last = _ends(samples)
    seconds = (last.time - first.time).total_seconds()
    return NowView(seconds=seconds, **{name: figure(first, last) for name, figure in FIGURES.items()})


def session_now_of(samples: Sequence[SessionSample]) -> SessionNowView:
    """As `now_of`, for a session."""
    if not samples:
        return SessionNowView()
    first, last = _ends(samples)
    return SessionNowView(
        seconds=(last.time - first.time).total_seconds(),
        load_bytes_per_second=_rate("load_bytes", first, last),
        store_bytes_per_second=_rate("store_bytes", first, last),
    )


def _ends(samples: Sequence[_Sample]) -> tuple[_Sample, _Sample]:
    """The last sample, and the first one that is at most `NOW_SECONDS` older."""
    last = samples[-1]
    return next(one for one in samples if (last.time - one.time).total_seconds() <= NOW_SECONDS), last


def _growth(before: float, after: float) -> float | None:
    """None if the counter shrank: the server, or the rank, restarted in between."""
    return after - before if after >= before else None


def _rate(name: str, before: SampleView | SessionSample, after: SampleView | SessionSample) -> float | None:
    growth = _growth(getattr(before, name), getattr(after, name))
    seconds = (after.time - before.time).total_seconds()
    return None if growth is None or seconds <= 0 else growth / seconds


def _per_second(name: str) -> Figure:
    return partial(_rate, name)


def _hit_ratio(before: SampleView, after: SampleView) -> float | None:
    queries = _growth(before.query_blocks, after.query_blocks)
    hits = _growth(before.hit_blocks, after.hit_blocks)
    return hits / queries if queries and hits is not None else None


def _usage(_: SampleView, after: SampleView) -> float | None:
    return after.used_slots / after.usable_slots if after.usable_slots else None


FIGURES: Mapping[str, Figure] = {
    "hit_ratio": _hit_ratio,
    "load_bytes_per_second": _per_second("load_bytes"),
    "store_bytes_per_second": _per_second("store_bytes"),
    "stored_blocks_per_second": _per_second("stored_blocks"),
    "evicted_blocks_per_second": _per_second("evicted_blocks"),
    "dropped_blocks_per_second": _per_second("dropped_blocks"),
    "used_ratio": _usage,
    "pinned_bytes": lambda _, after: float(after.pinned_bytes),
}
"""By the names of `NowView`'s fields, which describe them."""

METRICS: Mapping[str, Metric] = {
    "hit-ratio": Metric("ratio", {"hit ratio": "hit_ratio"}),
    "bandwidth": Metric("bytes_per_second", {"loads": "load_bytes_per_second", "stores": "store_bytes_per_second"}),
    "usage": Metric("ratio", {"slots in use": "used_ratio"}),
    "blocks": Metric(
        "blocks_per_second",
        {
            "stored": "stored_blocks_per_second",
            "evicted for capacity": "evicted_blocks_per_second",
            "dropped": "dropped_blocks_per_second",
        },
    ),
    "pinned": Metric("bytes", {"pinned": "pinned_bytes"}),
}
"""What the history can show."""
