"""Reads of a host for the routes, the status page and the conditions: its pools, sessions, transfers and tier."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvstow.stats import DIRECTIONS, LOAD_CHOICES, PendingTransfers
from kvstow.status import SESSION_STATES, SessionState, SessionStatus, TransferStatus
from kvstow_api.answers import NO_TIER, PoolCurveView, PoolView, TierView, TransfersView
from kvstow_api.directory import Directory, HostedPool
from kvstow_api.figures import now_of, saved_per_hour, seconds_per_ratio
from kvstow_api.sampler import CurveKey, CurveStatement, Sampler
from kvstow_api.sizing import too_early, with_sizes


def settings_etag(pool: HostedPool) -> str:
    """Return an ETag of the current settings. It is never reused, not even if a change is reverted. Read it before the
    settings themselves, so that a change in between is noticed."""
    return f'"{pool.facade.engine_id}-{pool.facade.admin.settings_revision}"'


def pool_views(directory: Directory, sampler: Sampler) -> list[PoolView]:
    """Return the views of all pools. O(pools + sessions)."""
    states = session_states(directory.sessions())
    return [_view(sampler, pool, states[pool.name]) for pool in directory.pools()]


def pool_view(directory: Directory, sampler: Sampler, pool: HostedPool) -> PoolView:
    return _view(sampler, pool, session_states(directory.sessions())[pool.name])


def session_states(sessions: Iterable[SessionStatus]) -> Mapping[str, Counter[SessionState]]:
    """Count the sessions of each pool by their states."""
    found: defaultdict[str, Counter[SessionState]] = defaultdict(Counter)
    for session in sessions:
        found[session.pool][session.state] += 1
    return found


def _view(sampler: Sampler, hosted: HostedPool, states: Counter[SessionState]) -> PoolView:
    etag = settings_etag(hosted)
    facade, highest = hosted.facade, hosted.max_capacity_slots
    readiness, stats, desired, bypass = facade.readiness(), facade.stats(), facade.desired(), facade.admin.bypass
    pool = stats.pool
    return PoolView(
        name=hosted.name,
        model=hosted.model,
        state=readiness.state,
        reason=readiness.reason,
        sessions=states.total(),
        session_states={state: states[state] for state in SESSION_STATES},
        resizable=hosted.is_resizable,
        etag=etag,
        slot_bytes=pool.slot_bytes,
        block_tokens=stats.block_tokens,
        capacity_slots=pool.capacity_slots,
        capacity_bytes=pool.capacity_slots * pool.slot_bytes,
        max_capacity_slots=highest,
        max_capacity_bytes=highest * pool.slot_bytes,
        usable_slots=pool.usable_slots,
        usable_bytes=pool.usable_slots * pool.slot_bytes,
        slots=pool.slots,
        policy=pool.policy,
        pinning_paused=desired.paused,
        leases=pool.leases,
        num_ranks=facade.config.num_ranks,
        granted_bytes=hosted.granted_bytes,
        due_bytes=hosted.due_bytes,
        drain_mode=facade.admin.drain_status.mode,
        bypassed=[direction for direction in DIRECTIONS if getattr(bypass, direction)],
        pending=stats.transfers.pending,
        now=now_of(sampler.of_pool(hosted.name).recent),
    )


def sessions_now(directory: Directory, sampler: Sampler) -> list[SessionStatus]:
    return [sampler.now_of_session(one) for one in directory.sessions()]


def transfers_view(
    pools: Sequence[HostedPool],
    most: int,
    *,
    scanned: int | None = None,
    wanted: Callable[[TransferStatus], bool] | None = None,
) -> TransfersView:
    """Return the oldest `most` transfers for which `wanted` is true. This looks only at the oldest `scanned` transfers
    of each pool, by default `most`."""
    items = [
        item for pool in pools for item in pool.facade.transfers(scanned or most) if wanted is None or wanted(item)
    ]
    items.sort(key=lambda item: -item.age_seconds)
    stats = [pool.facade.stats().transfers for pool in pools]
    return TransfersView(
        pending=_sum_of([one.pending for one in stats]),
        load_choices={choice: sum(one.choices[choice] for one in stats) for choice in LOAD_CHOICES},
        items=items[:most],
    )


def _sum_of(pending: Sequence[PendingTransfers]) -> PendingTransfers:
    return PendingTransfers(
        loads=sum(one.loads for one in pending),
        stores=sum(one.stores for one in pending),
        load_blocks=sum(one.load_blocks for one in pending),
        store_blocks=sum(one.store_blocks for one in pending),
        load_bytes=sum(one.load_bytes for one in pending),
        store_bytes=sum(one.store_bytes for one in pending),
        oldest_seconds=max((one.oldest_seconds for one in pending), default=0.0),
        stuck=sum(one.stuck for one in pending),
    )


def tier_view(directory: Directory) -> TierView:
    tier = directory.tier
    if tier is None:
        return NO_TIER
    return TierView(store=tier.store, url=tier.url, items=list(tier.tiers()), parts=list(tier.parts()))


_NO_CURVE = "the pool follows no curve: its setting `curve` is off"


def curve_view(sampler: Sampler, hosted: HostedPool) -> PoolCurveView:
    """Return what other sizes of a pool would hit. All callers get the same view until its figures have changed enough
    to be told anew (`CurveStatement.is_outdated`). O(sizes), apart from a sum over the pieces of the curve's window."""
    facade, samples = hosted.facade, sampler.of_pool(hosted.name)
    pool, evidence, curve = facade.stats().pool, facade.curve_evidence(), facade.curve()
    if evidence is not None and not evidence.needed_seen:  # the curve has followed no request yet
        evidence = evidence._replace(needed_seen=pool.usable_slots)
    view = PoolCurveView(
        pool=hosted.name,
        policy=pool.policy,
        num_slots=pool.usable_slots,
        num_bytes=pool.usable_slots * (hosted.stored_slot_bytes or facade.config.total_slot_bytes),
        slot_bytes=pool.slot_bytes,
        advice=_NO_CURVE if evidence is None else too_early(evidence),
        requests=0,
        blocks=0,
        items=[],
    )
    figures = [0.0 if evidence is None else evidence.progress]
    if curve is not None and evidence is not None:
        view = with_sizes(view, curve, evidence, seconds_per_ratio(samples.kept))
        figures += [ratio for size in view.items for ratio in (size.ratio, float(size.at_least))]
    key = CurveKey(view.policy, view.num_slots, view.num_bytes)
    statement = samples.statement
    if statement is None or statement.is_outdated(key, figures, samples.now):
        statement = samples.statement = CurveStatement(view, key, figures, samples.now)
    return replace(statement.view, saved_seconds_per_hour=saved_per_hour(samples.kept))
