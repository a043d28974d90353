"""Pools as the API shows them."""

from __future__ import annotations

from collections import Counter

from kvstow_api.appstate import AppState
from kvstow_api.directory import HostedPool
from kvstow_api.views import PoolView


def settings_etag(pool: HostedPool) -> str:
    """Identifies the current settings. Never reused, not even if a change is reverted. Read it before the settings
    themselves, so that a change in between is noticed."""
    return f'"{pool.facade.engine_id}-{pool.facade.admin.settings_revision}"'


def pool_views(app: AppState) -> list[PoolView]:
    sessions = Counter(session.pool for session in app.directory.sessions())
    return [_view(app, pool, sessions[pool.name]) for pool in app.directory.pools()]


def pool_view(app: AppState, pool: HostedPool) -> PoolView:
    return _view(app, pool, sum(session.pool == pool.name for session in app.directory.sessions()))


def _view(app: AppState, hosted: HostedPool, sessions: int) -> PoolView:
    etag = settings_etag(hosted)
    facade, highest = hosted.facade, hosted.max_capacity_slots
    stats, desired, readiness = facade.stats(), facade.desired(), facade.readiness()
    pool, config = stats.pool, facade.config
    return PoolView(
        name=hosted.name,
        model=hosted.model,
        state=readiness.state,
        reason=readiness.reason,
        sessions=sessions,
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
        granted_bytes=pool.capacity_slots * sum(map(config.slot_bytes_of, range(config.num_ranks))),
        slots=pool.slots,
        policy=pool.policy,
        pinning_paused=desired.paused,
        leases=pool.leases,
        num_ranks=config.num_ranks,
        pending=stats.transfers.pending,
        now=app.sampler.now_of_pool(hosted.name),
    )
