"""The overview of a server that the status page and `kvstow top` show: one model, and the only place for its words.

`kvstow_api.page` renders it as HTML, `kvstow_service.cli.board` as terminal text. No web framework: clients import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvstow.bytesize import format_size
from kvstow.stats import PendingTransfers
from kvstow.status import TransferStatus
from kvstow_api.numberformat import counted, duration
from kvstow_api.pooloverview import PoolOverview, PoolReadings, Row, pool_overview
from kvstow_api.poolrows import PoolRow, pool_row
from kvstow_api.rankrows import RankRow, rank_rows
from kvstow_api.sessionrows import SESSION_COLUMNS, SessionRow, session_row
from kvstow_api.tierrows import TierRow, tier_row
from kvstow_api.views.doctor import ConditionView
from kvstow_api.views.pools import PoolView
from kvstow_api.views.server import ReadinessView
from kvstow_api.views.sessions import SessionView
from kvstow_api.views.tier import NO_TIER, TierView
from kvstow_api.views.transfers import TransfersView

NUM_OLDEST = 4
"""Transfers that the overview lists."""

_GOOD_STATES = ("ready", "pinning", "starting")

_R = TypeVar("_R", PoolRow, SessionRow, TierRow)


class Readings(NamedTuple):
    """What the overview is made of, read at about the same time. `node`: engines attach to the server; otherwise it is
    embedded in one. `asked`: the pool that the viewer has chosen. `transfers` and `pool` are of the pool that
    `pool_to_show` names; without one, `transfers` are of all pools."""

    model: str | None
    mode: str
    version: str
    host_name: str
    attach: str | None
    node: bool
    readiness: ReadinessView
    pools: Sequence[PoolView]
    sessions: Sequence[SessionView]
    transfers: TransfersView
    asked: str | None
    pool: PoolReadings | None
    tier: TierView = NO_TIER
    conditions: Sequence[ConditionView] = ()


class MemoryBar(NamedTuple):
    """The memory of all pools together."""

    populated_bytes: int
    target_bytes: int
    progress: str


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
    def empty(self) -> str:
        """What to say where there is no pool."""
        how = f'; vLLM attaches with "attach": "{self.attach}" in kv_connector_extra_config' if self.attach else ""
        return f"no engine has attached yet, so there is no pool{how}"

    @property
    def session_columns(self) -> Mapping[str, str]:
        """Fields of a session's row and their titles: its pool only if there may be several."""
        return {name: title for name, title in SESSION_COLUMNS.items() if name != "pool" or self.selected is None}


def pool_to_show(pools: Sequence[str], asked: str | None) -> str | None:
    """Of these names, the pool that everything below the rows describes: the one asked for, or the only one."""
    if asked is not None:
        return asked if asked in pools else None
    return pools[0] if len(pools) == 1 else None


def overview(given: Readings) -> Overview:
    """O(pools + sessions + ranks)."""
    names = tuple(pool.name for pool in given.pools)
    is_missing = given.asked not in (None, *names)
    selected = None if given.pool is None else pool_to_show(names, given.asked)
    sessions = [session for session in given.sessions if selected in (None, session.pool)]
    bad = [one for one in given.conditions if one.severity != "info"]
    pools, engines = {one.pool for one in bad}, {one.session for one in bad}
    tiers = {one.pool for one in bad if one.name.startswith("tier_")}
    troubled = {(one.session, one.rank) for one in bad}
    if given.pool is None:
        ranks = tuple(rank for rank in rank_rows(given.readiness.ranks, troubled=troubled) if rank.troubled)
    else:
        paused = any(pool.pinning_paused for pool in given.pools if pool.name == selected)
        ranks = rank_rows(given.pool.ranks, pinning_paused=paused, troubled=troubled)
    state, reason = given.readiness.state, given.readiness.reason
    is_told = bool(bad) if state not in _GOOD_STATES else any(one.what == reason for one in given.conditions)
    return Overview(
        about=", ".join(filter(None, (given.model, given.mode, f"version {given.version}"))),
        host_name=given.host_name,
        attach=given.attach or "",
        state=state,
        reason="" if is_told else given.readiness.reason,
        conditions=tuple(given.conditions),
        memory=_memory(given),
        pools=tuple(pool_row(pool, troubled=pool.name in pools) for pool in given.pools),
        selected=selected,
        choices=names if len(names) > 1 or is_missing else (),
        is_missing=is_missing,
        sessions=tuple(session_row(session, troubled=session.id in engines) for session in sessions),
        ranks=ranks,
        tier=given.tier.url or "",
        tiers=tuple(
            tier_row(one, troubled=(one.pool in tiers)) for one in given.tier.items if selected in (None, one.pool)
        ),
        pending=(*_pending(given.transfers.pending), *_ways(given.transfers.load_choices)),
        oldest=tuple(Row(one.direction, one.state, _transfer(one, len(sessions))) for one in given.transfers.items),
        pool=None if given.pool is None else pool_overview(given.pool),
    )


def select_rows(rows: Sequence[_R], most: int) -> list[_R]:
    """At most `most` rows, in order: those that a condition concerns before others."""
    first = sorted(range(len(rows)), key=lambda number: not rows[number].troubled)
    return [rows[number] for number in sorted(first[:most])]


def _memory(given: Readings) -> MemoryBar:
    populated, target = given.readiness.memory.populated_bytes, given.readiness.memory.target_bytes
    size, verb = format_size(target), "populated" if given.node else "pinned"
    progress = size if populated >= target else f"{format_size(populated)} of {size} {verb}"
    if given.node:
        progress = f"{progress}, {format_size(sum(pool.granted_bytes for pool in given.pools))} in pools"
    return MemoryBar(populated, target, progress)


def _ways(choices: Mapping[str, int]) -> tuple[Row, ...]:
    """How loads went since the start, and why."""
    reasons = ", ".join(f"{choice.replace('_', ' ', 1)} {count:,}" for choice, count in choices.items() if count)
    by_layer = sum(count for choice, count in choices.items() if choice.startswith("layer_"))
    return (Row("loads by layer", f"{by_layer:,} of {sum(choices.values()):,}", reasons),) if reasons else ()


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


_NAMED_RANKS = 3
