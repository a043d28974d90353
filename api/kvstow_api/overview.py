"""The overview of a server that the status page and `kvstow top` show: one model, and the only place for its words.

`kvstow_api.page` renders it as HTML, `kvstow_service.cli.board` as terminal text. No web framework: clients import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvstow.bytesize import format_size
from kvstow.stats import DIRECTIONS, SLOT_STATES, EngineStats, PendingTransfers, PoolStats, SlotState
from kvstow.status import BypassStatus, DrainStatus, TransferStatus
from kvstow_api.history import METRICS, HistoryView, NowView, lines_of
from kvstow_api.numberformat import counted, duration, percent, rate
from kvstow_api.poolrows import PoolRow, bypass_trouble, pool_row
from kvstow_api.rankrows import RankRow, rank_rows
from kvstow_api.sessionrows import SESSION_COLUMNS, SessionRow, session_row
from kvstow_api.tierrows import TierRow, tier_row
from kvstow_api.views import (
    NO_TIER,
    PoolView,
    RankView,
    ReadinessView,
    SessionView,
    StatsView,
    TierBypassView,
    TierView,
    TransfersView,
)

NUM_OLDEST = 4
"""Transfers that the overview lists."""
NUM_POINTS = 60
"""Points of a curve at most: one every 5 s."""
NOT_PINNED = "not pinned"
"""In place of a slot state: slots that the ranks have yet to pin."""

_SLOT_ORDER: tuple[SlotState, ...] = ("protected", "leased", "cached", "filling", "quarantined", "free")
assert set(_SLOT_ORDER) == set(SLOT_STATES)
_NAMED_RANKS = 3
_NO_TIER_BYPASS = TierBypassView(bypassed=False, ttl_seconds_left=None)

_R = TypeVar("_R", PoolRow, SessionRow, TierRow)


class Readings(NamedTuple):
    """What the overview is made of, read at about the same time. `node`: engines attach to the server; otherwise it is
    embedded in one. `asked`: the pool that the viewer has chosen. `transfers` and `pool` are of the pool that
    `pool_to_show` names; without one, `transfers` are of all pools."""

    model: str | None
    mode: str
    version: str
    node: bool
    readiness: ReadinessView
    drain: DrainStatus
    bypass: BypassStatus
    pools: Sequence[PoolView]
    sessions: Sequence[SessionView]
    transfers: TransfersView
    asked: str | None
    pool: PoolReadings | None
    tier: TierView = NO_TIER


class PoolReadings(NamedTuple):
    """Of one pool. `stats` has all sections."""

    stats: EngineStats | StatsView
    ranks: Sequence[RankView]
    history: HistoryView


class Switch(NamedTuple):
    """Something that an operator has switched off; `undo` is the command that switches it on again."""

    words: str
    undo: str


class MemoryBar(NamedTuple):
    """The memory of all pools together. `failure`: why it cannot grow, empty if it can."""

    populated_bytes: int
    target_bytes: int
    progress: str
    failure: str


class Row(NamedTuple):
    name: str
    value: str
    note: str = ""


class Curve(NamedTuple):
    """A figure over time, None where it has no value, and its present value."""

    name: str
    now: str
    points: tuple[float | None, ...]


class Chart(NamedTuple):
    """Curves from 0 to `top`, which `scale` describes. `since_start`: the value for the server's whole life."""

    curves: tuple[Curve, ...]
    top: float
    scale: str
    since_start: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """The server, a row for each pool, and everything below: of the pool `selected` if there is one, else of all.

    `selected` is the pool that the viewer has chosen, or the only one. `choices`: the pools that a viewer can choose
    from, empty if there is no choice. `is_missing`: the chosen pool does not exist. `tier`: the store of the fleet
    tier, empty if none is attached; then there are no `tiers`. `pool` is None, and there are no
    `ranks` but those in trouble, while no pool is selected.
    """

    about: str
    state: str
    reason: str
    switches: tuple[Switch, ...]
    memory: MemoryBar
    pools: tuple[PoolRow, ...]
    selected: str | None
    choices: tuple[str, ...]
    is_missing: bool
    sessions: tuple[SessionRow, ...]
    ranks: tuple[RankRow, ...]
    tier: str
    tiers: tuple[TierRow, ...]
    pending: tuple[Row, ...]
    oldest: tuple[Row, ...]
    pool: PoolOverview | None

    @property
    def session_columns(self) -> Mapping[str, str]:
        """Fields of a session's row and their titles: its pool only if there may be several."""
        return {name: title for name, title in SESSION_COLUMNS.items() if name != "pool" or self.selected is None}


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


def pool_to_show(pools: Sequence[str], asked: str | None) -> str | None:
    """The pool of these names that everything below the rows is of: the one asked for, or the only one."""
    if asked is not None:
        return asked if asked in pools else None
    return pools[0] if len(pools) == 1 else None


def overview(given: Readings) -> Overview:
    """O(pools + sessions + ranks)."""
    names = tuple(pool.name for pool in given.pools)
    is_missing = given.asked not in (None, *names)
    selected = None if given.pool is None else pool_to_show(names, given.asked)
    sessions = [session for session in given.sessions if selected in (None, session.pool)]
    everywhere = [direction for direction in DIRECTIONS if getattr(given.bypass, direction)]
    told = (given.readiness.reason, bypass_trouble(everywhere))
    paused = [pool.name for pool in given.pools if pool.pinning_paused]
    if given.pool is None:
        ranks = tuple(rank for rank in rank_rows(given.readiness.ranks) if rank.trouble)
    else:
        ranks = rank_rows(given.pool.ranks, pinning_paused=selected in paused)
    return Overview(
        about=", ".join(filter(None, (given.model, given.mode, f"version {given.version}"))),
        state=given.readiness.state,
        reason=given.readiness.reason,
        switches=tuple(switches(given.drain, given.bypass, paused, given.tier.bypass, several=len(names) > 1)),
        memory=_memory(given),
        pools=tuple(pool_row(pool, told=told) for pool in given.pools),
        selected=selected,
        choices=names if len(names) > 1 or is_missing else (),
        is_missing=is_missing,
        sessions=tuple(session_row(session, on_node=given.node) for session in sessions),
        ranks=ranks,
        tier=given.tier.url or "",
        tiers=tuple(tier_row(one) for one in given.tier.items if selected in (None, one.pool)),
        pending=_pending(given.transfers.pending),
        oldest=tuple(Row(one.direction, one.state, _transfer(one, len(sessions))) for one in given.transfers.items),
        pool=None if given.pool is None else _pool_overview(given.pool),
    )


def select_rows(rows: Sequence[_R], most: int) -> list[_R]:
    """At most `most` rows, in order: those in trouble before others."""
    first = sorted(range(len(rows)), key=lambda number: not rows[number].trouble)
    return [rows[number] for number in sorted(first[:most])]


def _memory(given: Readings) -> MemoryBar:
    populated, target = given.readiness.memory.populated_bytes, given.readiness.memory.target_bytes
    size, verb = format_size(target), "populated" if given.node else "pinned"
    progress = size if populated >= target else f"{format_size(populated)} of {size} {verb}"
    if given.node:
        progress = f"{progress}, {format_size(sum(pool.granted_bytes for pool in given.pools))} in pools"
    return MemoryBar(populated, target, progress, given.readiness.memory.failure or "")


def _pool_overview(given: PoolReadings) -> PoolOverview:
    stats, history = given.stats, given.history
    assert stats.pool is not None
    assert stats.lookups is not None
    drops = {name: count for name, count in (stats.stores or {}).items() if name.startswith(("dropped_", "failed"))}
    return PoolOverview(
        about=_pool(stats.pool),
        slots=_slots(stats.pool),
        hits=_hits(history, stats.lookups.hit_ratio),
        bandwidth=_bandwidth(history),
        evictions=_counts(stats.evictions or {}),
        drops=_counts(drops),
        block_rates=_block_rates(history.now),
    )


# -- switches --------------------------------------------------------------------------------------------------------


def switches(
    drain: DrainStatus,
    bypass: BypassStatus,
    paused: Sequence[str] = (),
    tier: TierBypassView = _NO_TIER_BYPASS,
    *,
    several: bool = False,
) -> Iterator[Switch]:
    """`paused`: the pools that pin nothing for now. `several`: a command has to name the pool."""
    if drain.active:
        yield Switch(drain_words(drain), "kvstow undrain")
    if bypass.load or bypass.store:
        yield Switch(bypass_words(bypass), "kvstow bypass --off")
    if tier.bypassed:
        left = tier.ttl_seconds_left
        ends = "" if left is None else f" for another {duration(left)}"
        yield Switch(f"the tier's store is bypassed{ends}", "kvstow tier bypass --off")
    for pool in paused:
        of_pool, flag = (f" in pool {pool}", f" --pool {pool}") if several else ("", "")
        yield Switch(f"pinning is paused{of_pool}", f"kvstow pinning resume{flag}")


def bypassed(bypass: BypassStatus) -> list[str]:
    """The directions that are switched off."""
    return [name for name, is_off in (("loads", bypass.load), ("stores", bypass.store)) if is_off]


def bypass_words(bypass: BypassStatus) -> str:
    off, left = bypassed(bypass), bypass.ttl_seconds_left
    if not off:
        return "nothing is bypassed"
    return f"{' and '.join(off)} are bypassed" + ("" if left is None else f" for another {duration(left)}")


def drain_words(drain: DrainStatus) -> str:
    if not drain.active:
        return "the server is not draining"
    if drain.drained:
        return "drained: nothing is in flight"
    stays = " (loads continue)" if drain.mode == "stop_stores" else ""
    words = f"draining{stays}: {counted(drain.pending_transfers, 'transfer')} and {counted(drain.leases, 'lease')} left"
    left = drain.deadline_seconds_left
    return words if left is None else f"{words}, {duration(left)} until the deadline"


# -- the pool --------------------------------------------------------------------------------------------------------


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


# -- traffic ---------------------------------------------------------------------------------------------------------


def _hits(history: HistoryView, since_start: float | None) -> Chart:
    (line,) = lines_of(METRICS["hit-ratio"], history.items[-NUM_POINTS - 1 :])
    now = "no lookups" if history.now.hit_ratio is None else percent(history.now.hit_ratio)
    ever = "" if since_start is None else f"{percent(since_start)} since the start"
    return Chart((Curve(line.name, now, line.points),), 1.0, "0 to 100 %", ever)


def _bandwidth(history: HistoryView) -> Chart:
    lines = lines_of(METRICS["bandwidth"], history.items[-NUM_POINTS - 1 :])
    top = max((point for line in lines for point in line.points if point is not None), default=0.0)
    curves = tuple(Curve(line.name, rate(getattr(history.now, line.figure)), line.points) for line in lines)
    return Chart(curves, top, f"0 to {rate(top)}" if top else "no transfers")


def _pending(pending: PendingTransfers) -> tuple[Row, ...]:
    oldest = duration(pending.oldest_seconds) if pending.loads or pending.stores else "none"
    return (
        Row("loads", f"{pending.loads:,}", format_size(pending.load_bytes)),
        Row("stores", f"{pending.stores:,}", format_size(pending.store_bytes)),
        Row("oldest", oldest, f"{pending.stuck} stuck" if pending.stuck else ""),
    )


def _transfer(one: TransferStatus, num_sessions: int) -> str:
    session = f", session {one.session}" if num_sessions > 1 else ""
    request = f", request {one.request_id}" if one.request_id else ""
    return f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}, waits for {waits_for(one)}{session}{request}"


def waits_for(one: TransferStatus) -> str:
    """The ranks that work on the transfer, or the host if none does."""
    busy = [rank for rank in one.pending_ranks if rank not in one.idle_ranks]
    if one.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"
