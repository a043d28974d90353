"""The overview of a server as `kvstow top` shows it: the words for what `OverviewView` has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats, PendingTransfers, SlotState
from kvstow.status import RankStatus, TransferStatus
from kvstow_api.answers import ConditionView, OverviewView, PoolCurveView
from kvstow_api.columns import POOLS, SESSIONS, TIERS, Table, rank_state, waits_for
from kvstow_api.figures import AXES, CurvesView, Unit
from kvstow_api.texts import counted, duration, field_text, percent, rate

NOT_PINNED = "not pinned"
"""In place of a slot state: slots that the ranks have yet to pin."""

_GOOD_STATES = ("ready", "pinning", "starting")
_SHORTEST_WAIT = 1.0  # seconds
_SLOT_ORDER: tuple[SlotState, ...] = ("leased", "cached", "filling", "quarantined", "free")
assert set(_SLOT_ORDER) == set(SLOT_STATES)


class MemoryBar(NamedTuple):
    populated_bytes: int
    target_bytes: int
    progress: str


class Detail(NamedTuple):
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

    title: str
    curves: tuple[Curve, ...]
    top: float
    scale: str
    since_start: str = ""


class Sizes(NamedTuple):
    """What pools of other sizes would hit: a label and a share for each size, the shares in the order of last use
    beside it (none if that is the pool's own order), and the numbers of the present and of the next useful size.
    Without a curve there are only `words`. `words`: what follows; empty if a condition tells it."""

    labels: tuple[str, ...]
    ratios: tuple[float, ...]
    lru: tuple[float, ...]
    now: int | None
    next: int | None
    top: float
    scale: str
    figures: tuple[Detail, ...]
    words: str


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """One pool. `slots`: number by state, and of those not pinned, in the order of display."""

    about: str
    slots: Mapping[str, int]
    charts: tuple[Chart, ...]
    evictions: tuple[Detail, ...]
    drops: tuple[Detail, ...]
    block_rates: str
    sizes: Sizes


class RankRow(NamedTuple):
    """`progress` of pinning; `troubled`: a condition concerns the rank; `place`: host, pid and device, as far as known,
    and the session first if there are several."""

    rank: int
    state: str
    pinned_bytes: int
    target_bytes: int
    progress: str
    troubled: bool
    place: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The server, what is wrong, a row for each pool, and everything below: of the pool `selected` if there is one,
    else of all. `reason` is empty if a condition tells it; `attach`: what engines have as `attach`, empty where none
    can attach.

    `selected` is the pool that the viewer has chosen, or the only one. `choices`: the pools that a viewer can choose
    from, empty if there is no choice. `is_missing`: the chosen pool does not exist. `tier`: the store of the fleet
    tier, empty without one; then there are no `tiers`. `pool` is None, and there are no
    `ranks` but those that a condition concerns, while no pool is selected.
    """

    about: str
    host_name: str
    attach: str
    state: str
    reason: str
    conditions: tuple[ConditionView, ...]
    memory: MemoryBar
    pools: Table
    selected: str | None
    choices: tuple[str, ...]
    is_missing: bool
    sessions: Table
    ranks: tuple[RankRow, ...]
    tier: str
    tiers: Table
    pending: tuple[Detail, ...]
    oldest: tuple[Detail, ...]
    pool: PoolOverview | None

    @property
    def empty(self) -> str:
        how = f'; vLLM attaches with "attach": "{self.attach}" in kv_connector_extra_config' if self.attach else ""
        return f"no engine has attached yet, so there is no pool{how}"


def overview(given: OverviewView) -> Overview:
    names, conditions, selected = tuple(pool.name for pool in given.pools), given.conditions, given.selected
    bad = [one for one in conditions if one.severity != "info"]
    pools, engines = {one.pool for one in bad}, {one.session for one in bad}
    tiers = {one.pool for one in bad if one.name.startswith("tier_")}
    paused = any(pool.pinning_paused for pool in given.pools if pool.name == selected)
    is_told = bool(bad) if given.state not in _GOOD_STATES else any(one.what == given.reason for one in conditions)
    info, without = given.info, None if selected is None else "pool"
    sessions = Table.of(given.sessions, SESSIONS, lambda one: one.id in engines, without=without)
    return Overview(
        about=", ".join(filter(None, (info.settings.get("model"), info.mode, f"version {info.version}"))),
        host_name=info.host_name,
        attach=info.attach or "",
        state=given.state,
        reason="" if is_told else given.reason,
        conditions=tuple(conditions),
        memory=_memory(given),
        pools=_with(Table.of(given.pools, POOLS, lambda one: one.name in pools), given, "pools"),
        selected=selected,
        choices=names if len(names) > 1 or given.is_missing else (),
        is_missing=given.is_missing,
        sessions=_with(sessions, given, "sessions"),
        ranks=rank_rows(given.ranks, pinning_paused=paused, troubled={(one.session, one.rank) for one in bad}),
        tier=given.tier.url or "",
        tiers=_with(Table.of(given.tier.items, TIERS, lambda one: one.pool in tiers), given, "tiers"),
        pending=(*_pending(given.transfers.pending), *_ways(given.transfers.load_choices)),
        oldest=tuple(
            Detail(one.direction, one.state, _transfer(one, len(given.sessions))) for one in given.transfers.items
        ),
        pool=None if given.stats is None or given.curve is None else _pool_overview(given, given.stats, given.curve),
    )


def _with(table: Table, given: OverviewView, name: str) -> Table:
    return table._replace(omitted=given.omitted.get(name, 0))


def _memory(given: OverviewView) -> MemoryBar:
    populated, target = given.memory.populated_bytes, given.memory.target_bytes
    size, verb = format_size(target), "populated" if given.info.node else "pinned"
    progress = size if populated >= target else f"{format_size(populated)} of {size} {verb}"
    if given.info.node:
        progress = f"{progress}, {format_size(given.memory.granted_bytes)} in pools"
    return MemoryBar(populated, target, progress)


def _ways(choices: Mapping[str, int]) -> tuple[Detail, ...]:
    reasons = ", ".join(f"{choice.replace('_', ' ', 1)} {count:,}" for choice, count in choices.items() if count)
    by_layer = sum(count for choice, count in choices.items() if choice.startswith("layer_"))
    return (Detail("loads by layer", f"{by_layer:,} of {sum(choices.values()):,}", reasons),) if reasons else ()


def _pending(pending: PendingTransfers) -> tuple[Detail, ...]:
    oldest = duration(pending.oldest_seconds) if pending.loads or pending.stores else "none"
    return (
        Detail("loads", f"{pending.loads:,}", format_size(pending.load_bytes)),
        Detail("stores", f"{pending.stores:,}", format_size(pending.store_bytes)),
        Detail("oldest", oldest, f"{pending.stuck} stuck" if pending.stuck else ""),
    )


def _transfer(one: TransferStatus, num_sessions: int) -> str:
    session = f", session {one.session}" if num_sessions > 1 else ""
    request = f", request {one.request_id}" if one.request_id else ""
    return f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}, waits for {waits_for(one)}{session}{request}"


def _pool_overview(given: OverviewView, stats: EngineStats, curve: PoolCurveView) -> PoolOverview:
    pool, (curves,) = stats.pool, given.curves
    now = curves.now
    is_told = any(one.name == "pool_size" and one.pool == curve.pool for one in given.conditions)
    drops = {name: count for name, count in stats.stores.items() if name.startswith(("dropped_", "failed"))}
    return PoolOverview(
        about=f"{pool.usable_slots:,} of {pool.capacity_slots:,} slots usable, "
        f"{format_size(pool.capacity_slots * pool.slot_bytes)} per rank, {pool.policy}",
        slots={
            **{state: getattr(pool.slots, state) for state in _SLOT_ORDER},
            NOT_PINNED: max(0, pool.capacity_slots - pool.usable_slots),
        },
        charts=tuple(_chart(unit, curves, stats) for unit in dict.fromkeys(one.unit for one in curves.items)),
        evictions=_counts(stats.evictions),
        drops=_counts(drops),
        block_rates=f"evicted for capacity: {now.evicted_blocks_per_second or 0:.1f} blocks/s, "
        f"dropped: {now.dropped_blocks_per_second or 0:.1f} blocks/s",
        sizes=_sizes(curve, is_told),
    )


def _sizes(curve: PoolCurveView, is_told: bool) -> Sizes:
    items = curve.items
    now = next((number for number, size in enumerate(items) if size.times == 1), None)
    figures = []
    if now is not None:
        figures.append(Detail("hits", percent(items[now].ratio), f"now, with {format_size(curve.num_bytes)}"))
    if (better := curve.next_useful) is not None:
        figures.append(
            Detail("next", percent(better.ratio), f"with {format_size(better.num_bytes)}, the next useful size")
        )
    if curve.saved_seconds_per_hour is not None:
        figures.append(Detail("saved", duration(curve.saved_seconds_per_hour), "of prefill saved an hour"))
    top = max([0.05, *(size.ratio for size in items)])
    return Sizes(
        labels=tuple(format_size(size.num_bytes) for size in items),
        ratios=tuple(size.ratio for size in items),
        lru=() if curve.policy == "lru" else tuple(size.lru for size in items),
        now=now,
        next=next((number for number, size in enumerate(items) if size == better), None),
        top=top,
        scale=f"0 to {percent(top)} of the blocks, by the size on all ranks"
        + ("" if curve.policy == "lru" else f"; solid: policy {curve.policy}, dashed: in the order of last use"),
        figures=tuple(figures),
        words="" if is_told else curve.advice,
    )


def _counts(counts: Mapping[str, int]) -> tuple[Detail, ...]:
    return tuple(Detail(name.replace("_", " "), f"{count:,}") for name, count in counts.items() if count)


def _chart(unit: Unit, given: CurvesView, stats: EngineStats) -> Chart:
    axis = AXES[unit]
    items = [one for one in given.items if one.unit == unit]
    points = [point for one in items for point in one.points if point is not None]
    top = axis.top if axis.top is not None else max(points, default=0.0)
    ever = stats.lookups.hit_ratio if unit == "ratio" else None
    now = [getattr(given.now, one.figure) for one in items]
    texts = [
        axis.absent if value is None else field_text(one.figure, value) for one, value in zip(items, now, strict=True)
    ]
    return Chart(
        axis.title,
        tuple(Curve(one.label, text, one.points) for one, text in zip(items, texts, strict=True)),
        top,
        f"0 to {field_text(unit, top)}" if top else axis.absent,
        "" if ever is None else f"{percent(ever)} since the start",
    )


def rank_rows(
    ranks: Sequence[RankStatus],
    *,
    pinning_paused: bool = False,
    troubled: Collection[tuple[str | None, int | None]] = (),
) -> tuple[RankRow, ...]:
    """`troubled`: sessions and numbers of ranks that a condition concerns."""
    several = len({rank.session for rank in ranks}) > 1
    return tuple(
        RankRow(
            rank.rank,
            rank_state(rank),
            rank.pinned_bytes,
            rank.target_bytes,
            _progress(rank, pinning_paused),
            (rank.session, rank.rank) in troubled,
            _place(rank, several),
        )
        for rank in ranks
    )


def select_ranks(ranks: Sequence[RankRow], most: int) -> list[RankRow]:
    """At most `most` ranks, in order: those that a condition concerns, then those that have pinned least."""
    first = sorted(range(len(ranks)), key=lambda number: (not ranks[number].troubled, ranks[number].pinned_bytes))
    return [ranks[number] for number in sorted(first[:most])]


def _progress(rank: RankStatus, paused: bool) -> str:
    size = format_size(rank.target_bytes)
    left = rank.target_bytes - rank.pinned_bytes
    if left <= 0:
        return size
    words, speed = f"{format_size(rank.pinned_bytes)} of {size}", rank.pin_rate_bytes_per_second
    if not speed or paused or rank.state != "pinning" or left / speed < _SHORTEST_WAIT:
        return words  # a rank of a node waits for memory that is being populated, and then pins it in no time
    return f"{words}, {rate(speed)}, {duration(left / speed)} left"


def _place(rank: RankStatus, several: bool) -> str:
    process = f"pid {rank.pid}" if rank.pid is not None else None
    return ", ".join(filter(None, (rank.session if several else None, rank.host, process, rank.device)))
