"""The overview of a server that the status page and `kvstow top` show: one model, and the only place for its words.

`kvstow_api.page` renders it as HTML, `kvstow_service.cli.board` as terminal text. No web framework: clients import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats, PendingTransfers, PoolStats, SlotState
from kvstow.status import BypassStatus, DrainStatus, MemoryStatus, RankStatus, Readiness, TransferStatus
from kvstow_api.history import METRICS, HistoryView, NowView, lines_of
from kvstow_api.numberformat import counted, duration, percent, rate
from kvstow_api.views import PoolView, SessionView, StatsView

NUM_OLDEST = 4
"""Transfers that the overview lists."""
NUM_POINTS = 60
"""Points of a curve at most: one every 5 s."""
NOT_PINNED = "not pinned"
"""In place of a slot state: slots that the ranks have yet to pin."""

_SLOT_ORDER: tuple[SlotState, ...] = ("protected", "leased", "cached", "filling", "quarantined", "free")
assert set(_SLOT_ORDER) == set(SLOT_STATES)
_REPORTS_ARE_FRESH = 5.0  # seconds; ranks report every second
_NAMED_RANKS = 3


class Readings(NamedTuple):
    """What the overview is made of, read at about the same time. Without `pool`, there is none, or several and none
    was chosen. `node`: None where the server is embedded in an engine."""

    model: str | None
    mode: str
    version: str
    readiness: Readiness
    drain: DrainStatus
    bypass: BypassStatus
    pool: PoolReadings | None
    node: NodeReadings | None = None


class PoolReadings(NamedTuple):
    """Of one pool. `stats` has all sections."""

    pinning_paused: bool
    stats: EngineStats | StatsView
    oldest: Iterable[TransferStatus]
    history: HistoryView


class NodeReadings(NamedTuple):
    """Of a server that engines attach to."""

    memory: MemoryStatus
    pools: Sequence[PoolView]
    sessions: Sequence[SessionView]


class Switch(NamedTuple):
    """Something that an operator has switched off; `undo` is the command that switches it on again."""

    words: str
    undo: str


class RankLine(NamedTuple):
    """`progress` of pinning; `trouble` is empty if the rank is well; `place`: host, pid and device, as far as known."""

    rank: int
    state: str
    pinned_bytes: int
    target_bytes: int
    progress: str
    trouble: str
    place: str


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
    """`ranks`: of an embedded engine; on a node, `node` has what takes their place. `pool`: None if none is shown."""

    about: str
    state: str
    reason: str
    switches: tuple[Switch, ...]
    ranks: tuple[RankLine, ...]
    pool: PoolOverview | None
    node: NodeOverview | None


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """One pool. `slots`: number by state, and of those not pinned, in the order of display."""

    about: str
    slots: Mapping[str, int]
    hits: Chart
    bandwidth: Chart
    pending: tuple[Row, ...]
    oldest: tuple[Row, ...]
    evictions: tuple[Row, ...]
    drops: tuple[Row, ...]
    block_rates: str


@dataclass(frozen=True, slots=True)
class NodeOverview:
    """A node: its memory, and a row for each pool and each session."""

    populated_bytes: int
    target_bytes: int
    progress: str
    pools: tuple[Row, ...]
    sessions: tuple[Row, ...]


def overview(given: Readings) -> Overview:
    """O(ranks)."""
    paused = given.pool is not None and given.pool.pinning_paused
    return Overview(
        about=", ".join(filter(None, (given.model, given.mode, f"version {given.version}"))),
        state=given.readiness.state,
        reason=given.readiness.reason,
        switches=tuple(switches(given.drain, given.bypass, paused)),
        ranks=() if given.node else rank_lines(given.readiness.ranks, pinning_paused=paused),
        pool=None if given.pool is None else _pool_overview(given.pool),
        node=None if given.node is None else _node_overview(given.node),
    )


def _pool_overview(given: PoolReadings) -> PoolOverview:
    stats, history = given.stats, given.history
    assert stats.pool is not None
    assert stats.transfers is not None
    assert stats.lookups is not None
    drops = {name: count for name, count in (stats.stores or {}).items() if name.startswith(("dropped_", "failed"))}
    return PoolOverview(
        about=_pool(stats.pool),
        slots=_slots(stats.pool),
        hits=_hits(history, stats.lookups.hit_ratio),
        bandwidth=_bandwidth(history),
        pending=_pending(stats.transfers.pending),
        oldest=tuple(Row(one.direction, one.state, _transfer(one)) for one in given.oldest),
        evictions=_counts(stats.evictions or {}),
        drops=_counts(drops),
        block_rates=_block_rates(history.now),
    )


def _node_overview(given: NodeReadings) -> NodeOverview:
    memory = given.memory
    size = format_size(memory.target_bytes)
    populated = f"{format_size(memory.populated_bytes)} of {size} populated"
    return NodeOverview(
        populated_bytes=memory.populated_bytes,
        target_bytes=memory.target_bytes,
        progress=size if memory.populated_bytes >= memory.target_bytes else populated,
        pools=tuple(Row(one.name, _pool_words(one), counted(one.sessions, "session")) for one in given.pools),
        sessions=tuple(Row(one.id, one.state, _session_words(one)) for one in given.sessions),
    )


def _pool_words(pool: PoolView) -> str:
    size = format_size(pool.capacity_bytes)
    return f"{pool.usable_slots:,} of {pool.capacity_slots:,} slots usable, {size} per rank"


def _session_words(session: SessionView) -> str:
    process = "" if session.pid is None else f"pid {session.pid}"
    flight = counted(session.in_flight, "transfer")
    ranks = counted(len(session.ranks), "rank")
    return ", ".join(
        filter(None, (session.engine, f"pool {session.pool}", ranks, f"{flight} in flight", session.host, process))
    )


# -- switches --------------------------------------------------------------------------------------------------------


def switches(drain: DrainStatus, bypass: BypassStatus, pinning_paused: bool) -> Iterator[Switch]:
    if drain.active:
        yield Switch(drain_words(drain), "kvstow undrain")
    if bypass.load or bypass.store:
        yield Switch(bypass_words(bypass), "kvstow bypass --off")
    if pinning_paused:
        yield Switch("pinning is paused", "kvstow pinning resume")


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


# -- ranks -----------------------------------------------------------------------------------------------------------


def rank_lines(ranks: Iterable[RankStatus], *, pinning_paused: bool = False) -> tuple[RankLine, ...]:
    return tuple(
        RankLine(
            rank.rank,
            rank.state,
            rank.pinned_bytes,
            rank.target_bytes,
            _pin_progress(rank, pinning_paused),
            _rank_trouble(rank),
            _rank_place(rank),
        )
        for rank in ranks
    )


def select_ranks(ranks: Iterable[RankLine], most: int) -> list[RankLine]:
    """At most `most` ranks, in order: those in trouble, then those that have pinned least."""
    first = sorted(ranks, key=lambda rank: (not rank.trouble, rank.pinned_bytes))
    return sorted(first[:most], key=lambda rank: rank.rank)


def _pin_progress(rank: RankStatus, paused: bool) -> str:
    size = format_size(rank.target_bytes)
    left = rank.target_bytes - rank.pinned_bytes
    if left <= 0:
        return size
    words, speed = f"{format_size(rank.pinned_bytes)} of {size}", rank.pin_rate_bytes_per_second
    if not speed or paused or rank.state != "pinning":
        return words
    return f"{words}, {rate(speed)}, {duration(left / speed)} left"


def _rank_place(rank: RankStatus) -> str:
    process = f"pid {rank.pid}" if rank.pid is not None else None
    return ", ".join(filter(None, (rank.host, process, rank.device)))


def _rank_trouble(rank: RankStatus) -> str:
    error = ": ".join(part for part in (rank.error_reason, rank.error) if part)
    age = rank.last_report_age_seconds
    silence = f"last report {duration(age)} ago" if age is not None and age > _REPORTS_ARE_FRESH else ""
    return "; ".join(part for part in (error, silence) if part)


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


def _transfer(one: TransferStatus) -> str:
    request = f", request {one.request_id}" if one.request_id else ""
    return f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}, waits for {waits_for(one)}{request}"


def waits_for(one: TransferStatus) -> str:
    """The ranks that work on the transfer, or the host if none does."""
    busy = [rank for rank in one.pending_ranks if rank not in one.idle_ranks]
    if one.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"
