"""What the status page says: plain values, made of one look at the services. On the event loop; O(ranks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats, RankStatus, SlotState
from kvstow_api.figures import counted, duration, percent, rate
from kvstow_api.health import Finding
from kvstow_api.page.chart import Chart, polylines
from kvstow_api.series import METRICS, Line, lines_of
from kvstow_api.services import Services
from kvstow_api.views.history import SampleView

_SAMPLES = 60  # 5 min
_RANKS = 16
_OLDEST = 5
_EVENTS = 8
_BAR = 1000
_ORDER: tuple[SlotState, ...] = ("pinned", "leased", "cached", "filling", "quarantined", "free")
assert set(_ORDER) == set(SLOT_STATES)


class Check(NamedTuple):
    """`level`: ok, bad, or open for one that fails no probe."""

    name: str
    level: str
    words: str


class RankBar(NamedTuple):
    rank: int
    state: str
    pinned: int
    target: int
    words: str
    error: str


class Part(NamedTuple):
    """A part of the bar of slots, in thousandths of its width."""

    state: str
    slots: str
    begin: int
    width: int


class Row(NamedTuple):
    """A line of a table."""

    name: str
    value: str
    note: str = ""


class Happening(NamedTuple):
    time: str
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Facts:
    """One look."""

    state: str
    reason: str
    server: str
    checks: tuple[Check, ...]
    ranks: tuple[RankBar, ...]
    more_ranks: int
    slots: str
    parts: tuple[Part, ...]
    hits: Chart
    bandwidth: Chart
    hit_ratio: str
    pending: tuple[Row, ...]
    oldest: tuple[Row, ...]
    evictions: tuple[Row, ...]
    drops: tuple[Row, ...]
    happenings: tuple[Happening, ...]


def look(use: Services) -> Facts:
    """The facts of now."""
    stats, readiness = use.engine.stats(), use.engine.readiness()
    ranks = sorted(readiness.ranks, key=lambda rank: rank.pinned_bytes)
    samples = use.watch.history.items[-_SAMPLES - 1 :]
    ever = stats.hit_blocks / stats.query_blocks if stats.query_blocks else None
    return Facts(
        state=readiness.state,
        reason=readiness.reason,
        server=f"{use.context.version}, {use.context.mode}, up {duration(use.uptime)}",
        checks=_checks(use),
        ranks=tuple(_rank(rank) for rank in sorted(ranks[:_RANKS], key=lambda rank: rank.rank)),
        more_ranks=max(0, len(ranks) - _RANKS),
        slots=_slots(stats),
        parts=_parts(stats),
        hits=_hits(samples),
        bandwidth=_bandwidth(samples),
        hit_ratio=percent(ever),
        pending=_pending(stats),
        oldest=tuple(
            Row(one.direction, one.state, f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}")
            for one in use.engine.transfers(_OLDEST)
        ),
        evictions=_counts(stats.evicted_blocks),
        drops=_counts({name: n for name, n in stats.store_blocks.items() if name.startswith(("dropped_", "failed"))}),
        happenings=_happenings(use),
    )


def _checks(use: Services) -> tuple[Check, ...]:
    findings = use.health.probes["readyz"].run().findings
    return tuple(Check(one.name, _level(one), one.failure or "") for one in findings)


def _level(finding: Finding) -> str:
    if finding.failure is None:
        return "ok"
    return "bad" if finding.required else "open"


def _rank(rank: RankStatus) -> RankBar:
    words = format_size(rank.target_bytes)
    if rank.pinned_bytes < rank.target_bytes:
        words = f"{format_size(rank.pinned_bytes)} of {words}"
        if rank.pin_rate_bytes_per_second and rank.state == "pinning":
            left = (rank.target_bytes - rank.pinned_bytes) / rank.pin_rate_bytes_per_second
            words += f", {rate(rank.pin_rate_bytes_per_second)}, {duration(left)} left"
    error = ": ".join(part for part in (rank.error_reason, rank.error) if part)
    return RankBar(rank.rank, rank.state, rank.pinned_bytes, max(rank.target_bytes, 1), words, error)


def _slots(stats: EngineStats) -> str:
    size = format_size(stats.capacity_slots * stats.slot_bytes)
    return f"{stats.usable_slots:,} of {stats.capacity_slots:,} usable, {size} on each rank, {stats.policy}"


def _parts(stats: EngineStats) -> tuple[Part, ...]:
    """As wide as their share; whoever has a slot can be seen."""
    counts = {state: getattr(stats.slots, state) for state in _ORDER}
    total, begin, parts = stats.slots.usable, 0, []
    for state, count in counts.items():
        width = max(4, round(count * _BAR / total)) if count else 0
        width = min(width, _BAR - begin)
        parts.append(Part(state, f"{count:,}", begin, width))
        begin += width
    return tuple(parts)


def _hits(samples: list[SampleView]) -> Chart:
    (line,) = lines_of(METRICS["hit-ratio"], samples)
    now = percent(line.last)
    return Chart(f"hit ratio of the last 5 minutes, now {now}", (("hit ratio", now, polylines(line, _SAMPLES, 1.0)),))


def _bandwidth(samples: list[SampleView]) -> Chart:
    lines = lines_of(METRICS["bandwidth"], samples)
    top = max((point for line in lines for point in line.points if point is not None), default=0.0)
    drawn = tuple((line.name, rate(_now(line)), polylines(line, _SAMPLES, top)) for line in lines)
    words = ", ".join(f"{name} {now}" for name, now, _ in drawn)
    return Chart(f"bandwidth of each rank in the last 5 minutes, at most {rate(top)}, now {words}", drawn)


def _now(line: Line) -> float:
    return (line.points[-1] if line.points else None) or 0.0


def _pending(stats: EngineStats) -> tuple[Row, ...]:
    pending = stats.pending
    oldest = duration(pending.oldest_seconds) if pending.loads or pending.stores else "none"
    return (
        Row("loads", f"{pending.loads:,}", format_size(pending.load_bytes)),
        Row("stores", f"{pending.stores:,}", format_size(pending.store_bytes)),
        Row("oldest", oldest, f"{pending.stuck} stuck" if pending.stuck else ""),
    )


def _counts(counts: Mapping[str, int]) -> tuple[Row, ...]:
    return tuple(Row(name.replace("_", " "), f"{count:,}") for name, count in counts.items() if count)


def _happenings(use: Services) -> tuple[Happening, ...]:
    """The newest first."""
    entries, _ = use.journal.after(max(0, use.journal.last - _EVENTS))
    return tuple(_happening(entry.type, entry.data) for entry in reversed(entries))


def _happening(kind: str, data: Mapping[str, Any]) -> Happening:
    match kind:
        case "state":
            words = f"{data['state']}: {data['reason']}"
        case "rank":
            words = f"{data['rank']} is {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case "operation":
            words = f"{data['kind']} {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case _:
            words = f"{data['method']} {data['path']} by {data['actor']}"
    return Happening(data["time"], kind, words)
