"""The overview of one pool: its slots, its curves, and what it evicts and drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats, PoolStats, SlotState
from kvstow.status import RankStatus
from kvstow_api.figures import CurvesView, NowView, Unit
from kvstow_api.numberformat import percent, rate

NOT_PINNED = "not pinned"
"""In place of a slot state: slots that the ranks have yet to pin."""

_SLOT_ORDER: tuple[SlotState, ...] = ("protected", "leased", "cached", "filling", "quarantined", "free")
assert set(_SLOT_ORDER) == set(SLOT_STATES)


class PoolReadings(NamedTuple):
    """Of one pool."""

    stats: EngineStats
    ranks: Sequence[RankStatus]
    curves: CurvesView


class Row(NamedTuple):
    name: str
    value: str
    note: str = ""


class Curve(NamedTuple):
    """A figure over time, None where it has no value, and its present value."""

    name: str
    now: str
    points: Sequence[float | None]


class Chart(NamedTuple):
    """Curves from 0 to `top`, which `scale` describes. `since_start`: the value for the server's whole life."""

    curves: tuple[Curve, ...]
    top: float
    scale: str
    since_start: str = ""


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """One pool. `slots`: number by state, and of those not pinned, in the order of display."""

    about: str
    slots: Mapping[str, int]
    hits: Chart
    bandwidth: Chart
    evictions: tuple[Row, ...]
    drops: tuple[Row, ...]
    block_rates: str


def pool_overview(given: PoolReadings) -> PoolOverview:
    stats, curves = given.stats, given.curves
    drops = {name: count for name, count in stats.stores.items() if name.startswith(("dropped_", "failed"))}
    return PoolOverview(
        about=_pool(stats.pool),
        slots=_slots(stats.pool),
        hits=_hits(curves, stats.lookups.hit_ratio),
        bandwidth=_bandwidth(curves),
        evictions=_counts(stats.evictions),
        drops=_counts(drops),
        block_rates=_block_rates(curves.now),
    )


def _pool(pool: PoolStats) -> str:
    size = format_size(pool.capacity_slots * pool.slot_bytes)
    return f"{pool.usable_slots:,} of {pool.capacity_slots:,} slots usable, {size} per rank, {pool.policy}"


def _slots(pool: PoolStats) -> Mapping[str, int]:
    counts: dict[str, int] = {state: getattr(pool.slots, state) for state in _SLOT_ORDER}
    return {**counts, NOT_PINNED: max(0, pool.capacity_slots - pool.usable_slots)}


def _counts(counts: Mapping[str, int]) -> tuple[Row, ...]:
    return tuple(Row(name.replace("_", " "), f"{count:,}") for name, count in counts.items() if count)


def _block_rates(now: NowView) -> str:
    evicted, dropped = now.evicted_blocks_per_second or 0.0, now.dropped_blocks_per_second or 0.0
    return f"evicted for capacity: {evicted:.1f} blocks/s, dropped: {dropped:.1f} blocks/s"


def _hits(given: CurvesView, since_start: float | None) -> Chart:
    ever = "" if since_start is None else f"{percent(since_start)} since the start"
    curves = _curves(given, "ratio", lambda now: "no lookups" if now is None else percent(now))
    return Chart(curves, 1.0, "0 to 100 %", ever)


def _bandwidth(given: CurvesView) -> Chart:
    curves = _curves(given, "bytes_per_second", rate)
    top = max((point for curve in curves for point in curve.points if point is not None), default=0.0)
    return Chart(curves, top, f"0 to {rate(top)}" if top else "no transfers")


def _curves(given: CurvesView, unit: Unit, words: Callable[[float | None], str]) -> tuple[Curve, ...]:
    """All curves of this unit, which share an axis."""
    return tuple(
        Curve(one.label, words(getattr(given.now, one.figure)), one.points) for one in given.items if one.unit == unit
    )
