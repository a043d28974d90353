"""Pools as the API shows them."""

from __future__ import annotations

from collections import Counter

from kvstow_api.directory import Directory, HostedPool
from kvstow_api.views import PoolView


def settings_etag(pool: HostedPool) -> str:
    """Identifies the current settings. Never reused, not even if a change is reverted. Read it before the settings
    themselves, so that a change in between is noticed."""
    return f'"{pool.facade.engine_id}-{pool.facade.admin.settings_revision}"'


def pool_views(directory: Directory) -> list[PoolView]:
    sessions = Counter(session.pool for session in directory.sessions())
    return [_view(pool, sessions[pool.name]) for pool in directory.pools()]


def pool_view(directory: Directory, pool: HostedPool) -> PoolView:
    return _view(pool, sum(session.pool == pool.name for session in directory.sessions()))


def _view(hosted: HostedPool, sessions: int) -> PoolView:
    etag = settings_etag(hosted)
    facade, highest = hosted.facade, hosted.max_capacity_slots
    stats, desired = facade.stats(), facade.desired()
    pool = stats.pool
    return PoolView(
        name=hosted.name,
        model=hosted.model,
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
        slots=pool.slots,
        policy=pool.policy,
        pinning_paused=desired.paused,
        leases=pool.leases,
        num_ranks=facade.config.num_ranks,
    )
