"""Pools and sessions as the API shows them."""

from __future__ import annotations

from collections import Counter

from kvstow.stats import DIRECTIONS
from kvstow.status import SESSION_STATES, SessionState
from kvstow_api.directory import Directory, HostedPool
from kvstow_api.sampler import Sampler
from kvstow_api.views.pools import PoolView
from kvstow_api.views.sessions import SessionView


def settings_etag(pool: HostedPool) -> str:
    """Identifies the current settings. Never reused, not even if a change is reverted. Read it before the settings
    themselves, so that a change in between is noticed."""
    return f'"{pool.facade.engine_id}-{pool.facade.admin.settings_revision}"'


def pool_views(directory: Directory, sampler: Sampler) -> list[PoolView]:
    """Of all pools. O(pools + sessions)."""
    states: dict[str, Counter[SessionState]] = {}
    for session in directory.sessions():
        states.setdefault(session.pool, Counter())[session.status.state] += 1
    return [_view(sampler, pool, states.get(pool.name, Counter())) for pool in directory.pools()]


def pool_view(directory: Directory, sampler: Sampler, pool: HostedPool) -> PoolView:
    states = Counter(session.status.state for session in directory.sessions() if session.pool == pool.name)
    return _view(sampler, pool, states)


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
        now=sampler.now_of_pool(hosted.name),
    )


def session_views(directory: Directory, sampler: Sampler) -> list[SessionView]:
    """Of all sessions, the oldest first."""
    return [SessionView.of(one, sampler.now_of_session(one.session_id)) for one in directory.sessions()]
