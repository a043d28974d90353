"""What the status page says: plain values, read from the application at one moment. On the event loop; O(ranks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats, PoolStats, SlotState
from kvstow.status import RankStatus
from kvstow_api.appstate import AppState
from kvstow_api.health import Finding
from kvstow_api.history import METRICS, NowView, SampleView, lines_of
from kvstow_api.numberformat import duration, percent, rate
from kvstow_api.page.chart import Chart, polylines
from kvstow_api.words import (
    NOT_PINNED,
    Switch,
    block_movement,
    hit_ratio_now,
    most_telling,
    pin_progress,
    rank_trouble,
    switched,
    transfer_wait,
)

_SAMPLES = 60  # 5 min
_RANKS = 16
_OLDEST = 5
_EVENTS = 8
_BAR = 1000
_ORDER: tuple[SlotState, ...] = ("protected", "leased", "cached", "filling", "quarantined", "free")
assert set(_ORDER) == set(SLOT_STATES)


class Check(NamedTuple):
    """`level`: ok, bad, or open for one that fails no probe. `words`: what it says that the reason does not."""

    name: str
    level: str
    words: str


class RankBar(NamedTuple):
    rank: int
    state: str
    pinned: int
    target: int
    words: str
    trouble: str


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
    switches: tuple[Switch, ...]
    checks: tuple[Check, ...]
    ranks: tuple[RankBar, ...]
    more_ranks: int
    slots: str
    parts: tuple[Part, ...]
    hits: Chart
    bandwidth: Chart
    pending: tuple[Row, ...]
    oldest: tuple[Row, ...]
    movement: str
    evictions: tuple[Row, ...]
    drops: tuple[Row, ...]
    happenings: tuple[Happening, ...]


def look(app: AppState) -> Facts:
    """The facts of now."""
    stats, readiness = app.engine.stats(), app.engine.readiness()
    history = app.sampler.history
    samples, now = history.items[-_SAMPLES - 1 :], history.now
    ever = stats.lookups.hit_ratio
    return Facts(
        state=readiness.state,
        reason=readiness.reason,
        server=_server(app),
        switches=tuple(
            switched(app.engine.admin.drain_status, app.engine.admin.bypass, pinning_paused=app.engine.desired().paused)
        ),
        checks=_checks(app, readiness.reason),
        ranks=tuple(map(_rank, most_telling(readiness.ranks, _RANKS))),
        more_ranks=max(0, len(readiness.ranks) - _RANKS),
        slots=_slots(stats.pool),
        parts=_parts(stats.pool),
        hits=_hits(samples, now, ever),
        bandwidth=_bandwidth(samples, now),
        pending=_pending(stats),
        oldest=tuple(Row(one.direction, one.state, transfer_wait(one)) for one in app.engine.transfers(_OLDEST)),
        movement=block_movement(now),
        evictions=_counts(stats.evictions),
        drops=_counts({name: n for name, n in stats.stores.items() if name.startswith(("dropped_", "failed"))}),
        happenings=_happenings(app),
    )


def _server(app: AppState) -> str:
    """Nothing that changes while it runs: this part of the page is sent again only when there is news."""
    model = app.host.settings.get("model")
    about = (model, app.host.mode, f"version {app.host.version}", *app.host.addresses[:1])
    return ", ".join((*filter(None, about), f"since {app.started:%Y-%m-%d %H:%M:%S} UTC"))


def _checks(app: AppState, reason: str) -> tuple[Check, ...]:
    findings = app.health.probes["readyz"].run().findings
    return tuple(Check(one.name, _level(one), _words(one, reason)) for one in findings)


def _words(finding: Finding, reason: str) -> str:
    failure = finding.failure or ""
    return "" if failure.endswith(reason) else failure


def _level(finding: Finding) -> str:
    if finding.failure is None:
        return "ok"
    return "bad" if finding.required else "open"


def _rank(rank: RankStatus) -> RankBar:
    target = max(rank.target_bytes, 1)
    return RankBar(rank.rank, rank.state, rank.pinned_bytes, target, pin_progress(rank), rank_trouble(rank))


def _slots(pool: PoolStats) -> str:
    size = format_size(pool.capacity_slots * pool.slot_bytes)
    return f"{pool.usable_slots:,} of {pool.capacity_slots:,} usable, {size} on each rank, {pool.policy}"


def _parts(pool: PoolStats) -> tuple[Part, ...]:
    """As wide as their share; whoever has a slot can be seen."""
    counts: dict[str, int] = {state: getattr(pool.slots, state) for state in _ORDER}
    if pool.usable_slots < pool.capacity_slots:
        counts[NOT_PINNED] = pool.capacity_slots - pool.usable_slots
    total, begin, parts = sum(counts.values()), 0, []
    for state, count in counts.items():
        width = max(4, round(count * _BAR / total)) if count else 0
        width = min(width, _BAR - begin)
        parts.append(Part(state, f"{count:,}", begin, width))
        begin += width
    return tuple(parts)


def _hits(samples: list[SampleView], now: NowView, ever: float | None) -> Chart:
    (line,) = lines_of(METRICS["hit-ratio"], samples)
    note = "0 to 100 %, the last 5 minutes" + ("" if ever is None else f"; {percent(ever)} since the start")
    words = hit_ratio_now(now)
    return Chart(f"hit ratio, now {words}", ((line.name, words, polylines(line, _SAMPLES, 1.0)),), note)


def _bandwidth(samples: list[SampleView], now: NowView) -> Chart:
    lines = lines_of(METRICS["bandwidth"], samples)
    top = max((point for line in lines for point in line.points if point is not None), default=0.0)
    drawn = tuple((line.name, rate(getattr(now, line.figure)), polylines(line, _SAMPLES, top)) for line in lines)
    words = ", ".join(f"{name} {moved}" for name, moved, _ in drawn)
    span = f"0 to {rate(top)}" if top else "nothing was moved"
    return Chart(f"bandwidth of each rank, now {words}", drawn, f"{span}, the last 5 minutes")


def _pending(stats: EngineStats) -> tuple[Row, ...]:
    pending = stats.transfers.pending
    oldest = duration(pending.oldest_seconds) if pending.loads or pending.stores else "none"
    return (
        Row("loads", f"{pending.loads:,}", format_size(pending.load_bytes)),
        Row("stores", f"{pending.stores:,}", format_size(pending.store_bytes)),
        Row("oldest", oldest, f"{pending.stuck} stuck" if pending.stuck else ""),
    )


def _counts(counts: Mapping[str, int]) -> tuple[Row, ...]:
    return tuple(Row(name.replace("_", " "), f"{count:,}") for name, count in counts.items() if count)


def _happenings(app: AppState) -> tuple[Happening, ...]:
    """The newest first."""
    entries, _ = app.journal.after(max(0, app.journal.last - _EVENTS))
    return tuple(_happening(entry.type, entry.data) for entry in reversed(entries))


def _happening(kind: str, data: Mapping[str, Any]) -> Happening:
    match kind:
        case "state":
            words = f"{data['state']}: {data['reason']}"
        case "rank":
            words = f"{data['rank']} is {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case "operation":
            noun = f"dry run of {data['kind']}" if data["dry_run"] else data["kind"]
            words = f"{noun} {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case _:
            words = f"{data['method']} {data['path']} by {data['actor']}"
    return Happening(data["time"], kind, words)
