"""The overview of a server: one document of its state for all viewers. It is made at most once a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from kvstow.status import MemoryStatus, RankStatus, SessionSummary
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.answers import ConditionView, EventLine, OverviewView, PoolView, TroubledView
from kvstow_api.appstate import AppState, info_view
from kvstow_api.directory import HostedPool, host_readiness, live_ranks
from kvstow_api.figures import PoolHistory, curves_of, headline_of
from kvstow_api.readings import curve_view, pool_views, sessions_now, tier_view, transfers_view
from kvstow_api.shortlist import shortlist
from kvstow_api.texts import event_words

MOST_POOLS, MOST_SESSIONS, MOST_RANKS, MOST_TIERS = 64, 128, 64, 64
MOST_CONDITIONS, MOST_EVENTS, MOST_CURVES, MOST_TRANSFERS = 24, 10, 12, 4
_MOST_OF_MEMORY = 16
"""How many sentences and sessions the state of the memory names at most."""
INTERVAL = 1.0
"""How long a document is used before it is made again, in seconds."""
_NO_POOL = ""
"""Stands for every name that no pool has. All such names share one document, so there are at most two more documents
than pools."""

_Item = TypeVar("_Item")


def pool_to_show(pools: Sequence[str], requested: str | None) -> str | None:
    """Return which of these pools the overview is about: the requested one, or the only one."""
    if requested is not None:
        return requested if requested in pools else None
    return pools[0] if len(pools) == 1 else None


class _Document(NamedTuple):
    made_at: float
    encoded: bytes


class Overviews:
    """The documents of one application, as JSON. Used on the event loop.

    Making a document takes milliseconds. So it is made at most once a second for each pool, and once for the whole
    host, regardless of the number of requests."""

    def __init__(self, app: AppState) -> None:
        self._app, self._clock = app, app.host.clock
        self._documents: dict[str | None, _Document] = {}

    def encoded(self, pool: str | None = None) -> bytes:
        """Return the document about this pool, or about the whole host if `pool` is None."""
        pools = {one.name for one in self._app.directory.pools()}
        name = _NO_POOL if pool is not None and pool not in pools else pool
        found = self._documents.get(name)
        now = self._clock()
        if found is None or now - found.made_at >= INTERVAL:
            kept = (None, _NO_POOL, *pools)
            self._documents = {one: document for one, document in self._documents.items() if one in kept}
            found = self._documents[name] = _Document(now, msgspec.json.encode(read_overview(self._app, name)))
        return found.encoded


def read_overview(app: AppState, requested: str | None = None) -> OverviewView:
    """Return the present state, of the `requested` pool or of the whole host. Call it on the event loop. O(pools +
    sessions + ranks)."""
    directory = app.directory
    hosted = directory.pools()
    selected = pool_to_show([pool.name for pool in hosted], requested)
    shown = [pool for pool in hosted if selected in (None, pool.name)]
    names = {pool.name for pool in shown}
    readiness, conditions = host_readiness(directory), app.conditions.find().conditions
    chosen = shown[0] if selected is not None else None
    limited = _Limited([one for one in conditions if one.severity != "info"])
    tier, info = tier_view(directory), info_view(app)
    histories = [_history(app, pool) for pool in shown]
    pools = limited.first(
        "pools",
        pool_views(directory, app.sampler),
        MOST_POOLS,
        lambda one: one.name == selected or limited.has_pool(one),
    )
    sessions = [one.summary() for one in sessions_now(directory, app.sampler) if one.pool in names]
    sessions = limited.first("sessions", sessions, MOST_SESSIONS, limited.has_session)
    ranks = limited.first(
        "ranks",
        [one for one in live_ranks(directory, chosen) if chosen is not None or limited.has_rank(one)],
        MOST_RANKS if chosen is not None else MOST_RANKS // 4,
        limited.has_rank,
    )
    tiers = [one for one in tier.items if one.pool in names]
    tiers = limited.first("tiers", tiers, MOST_TIERS, limited.has_tier)
    kinds: dict[str, ConditionView] = {}
    for one in conditions:
        kinds.setdefault(one.name, one)
    return OverviewView(
        time=datetime.now(UTC),
        info=replace(info, pools=info.pools[:MOST_POOLS]),
        state=readiness.state,
        reason=readiness.reason,
        conditions=limited.first("conditions", list(kinds.values()), MOST_CONDITIONS),
        alike={name: number - 1 for name, number in Counter(one.name for one in conditions).items() if number > 1},
        troubled=limited.troubled_of(pools, sessions, ranks, tiers),
        memory=_bounded(readiness.memory),
        headline=headline_of(histories),
        selected=selected,
        is_missing=requested is not None and selected is None,
        pools=pools,
        sessions=sessions,
        ranks=ranks,
        tier=replace(tier, items=tiers),
        transfers=transfers_view(shown, MOST_TRANSFERS),
        curves=[
            curves_of(pool.name, history.kept) for pool, history in zip(shown[:MOST_CURVES], histories, strict=False)
        ],
        stats=None if chosen is None else chosen.facade.stats(),
        curve=None if chosen is None else curve_view(app.sampler, chosen),
        events=_events(app, selected),
        omitted=limited.omitted,
    )


class _Limited:
    """Chooses the items of each kind that the document lists. `omitted` counts the others. `bad` are conditions that
    are worse than information."""

    def __init__(self, bad: Collection[ConditionView]) -> None:
        self._pools, self._sessions = {one.pool for one in bad}, {one.session for one in bad}
        self._tiers = {one.pool for one in bad if one.name.startswith("tier_")}
        self._ranks = {(one.session, one.rank) for one in bad}
        self.omitted: dict[str, int] = {}

    def has_pool(self, pool: PoolView) -> bool:
        return pool.name in self._pools

    def has_session(self, session: SessionSummary) -> bool:
        return session.id in self._sessions

    def has_rank(self, rank: RankStatus) -> bool:
        return (rank.session, rank.rank) in self._ranks

    def has_tier(self, tier: TierStatus) -> bool:
        return tier.pool in self._tiers

    def troubled_of(
        self,
        pools: Sequence[PoolView],
        sessions: Sequence[SessionSummary],
        ranks: Sequence[RankStatus],
        tiers: Sequence[TierStatus],
    ) -> TroubledView:
        """Which of them a condition concerns."""
        return TroubledView(
            pools=[one.name for one in pools if self.has_pool(one)],
            sessions=[one.id for one in sessions if self.has_session(one)],
            ranks=[f"{one.session}/{one.rank}" for one in ranks if self.has_rank(one)],
            tiers=[one.namespace for one in tiers if self.has_tier(one)],
        )

    def first(
        self, name: str, items: Sequence[_Item], most: int, is_first: Callable[[_Item], bool] = lambda _: False
    ) -> list[_Item]:
        """Return at most `most` of the items, in their order. If there are more, items for which `is_first` is true
        take precedence."""
        self.omitted[name] = max(0, len(items) - most)
        return shortlist(items, most, lambda one: not is_first(one))


def _bounded(memory: MemoryStatus) -> MemoryStatus:
    lists = {name: getattr(memory, name)[:_MOST_OF_MEMORY] for name in ("waits", "kept", "notices")}
    return replace(memory, **lists)


def _history(app: AppState, pool: HostedPool) -> PoolHistory:
    samples, config = app.sampler.of_pool(pool.name), pool.facade.config
    total_slot_bytes = pool.stored_slot_bytes or config.total_slot_bytes
    return PoolHistory(config.num_ranks, total_slot_bytes, samples.recent, samples.kept)


def _events(app: AppState, pool: str | None) -> list[EventLine]:
    entries, _ = app.journal.after(0)
    found = (entry for entry in reversed(entries) if pool is None or entry.data.get("pool") in (None, pool))
    return [
        EventLine(time=entry.data["time"], words=event_words(entry.type, entry.data))
        for entry in islice(found, MOST_EVENTS)
    ]
