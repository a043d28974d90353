"""The readiness of a host over all its pools and sessions."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.bytesize import format_size
from kvstow.stats import EngineState
from kvstow.status import HostedSession
from kvstow_api.directory import Directory, HostedPool
from kvstow_api.hostedtier import HostTier
from kvstow_api.numberformat import counted
from kvstow_api.poolchoice import NO_POOL
from kvstow_api.views.ranks import RankView
from kvstow_api.views.server import PoolReadinessView, ReadinessView, TierReadinessView


def host_readiness(directory: Directory, pool: HostedPool | None = None) -> ReadinessView:
    """Of one pool, or of the whole host. Sizes of memory are the host's in any case. O(pools + ranks +
    namespaces)."""
    memory = directory.memory()
    pools = directory.pools() if pool is None else (pool,)
    found = [(one, one.facade.readiness()) for one in pools]
    state: EngineState
    if pool is not None or not directory.is_node:
        ((_, only),) = found
        state, reason = only.state, only.reason
    else:
        state, reason = _node_state(directory, [(one.name, it.state, it.reason) for one, it in found])
    return ReadinessView(
        state=state,
        reason=reason,
        usable_slots=sum(one.usable_slots for _, one in found),
        capacity_slots=sum(one.capacity_slots for _, one in found),
        ranks=rank_views(directory, pool),
        pools=[
            PoolReadinessView(
                pool=one.name,
                model=one.model,
                state=readiness.state,
                reason=readiness.reason,
                usable_slots=readiness.usable_slots,
                capacity_slots=readiness.capacity_slots,
            )
            for one, readiness in found
        ],
        memory=memory,
        tiers=[] if directory.tier is None else _tiers(directory.tier, pool),
    )


def _tiers(tier: HostTier, pool: HostedPool | None) -> list[TierReadinessView]:
    return [
        TierReadinessView(pool=one.pool, namespace=one.namespace, state=one.status.state, reason=one.status.reason)
        for one in tier.tiers()
        if pool is None or one.pool == pool.name
    ]


def _node_state(directory: Directory, pools: list[tuple[str, EngineState, str]]) -> tuple[EngineState, str]:
    """A node serves other pools while one is starting or pinning, so only a degraded or stopped pool counts."""
    drain, memory = directory.switches.drain_status, directory.memory()
    if drain.active:
        return "draining", f"an operator drains the node (mode {drain.mode})"
    troubles = [f"pool {name}: {reason}" for name, state, reason in pools if state in ("degraded", "stopped")]
    if memory.failure:
        troubles.insert(0, f"memory: {memory.failure}")
    if troubles:
        return "degraded", "; ".join(troubles)
    if memory.populated_bytes < memory.target_bytes:
        sizes = f"{format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)}"
        return "pinning", f"{sizes} of memory are populated"
    sessions = len(directory.sessions())
    return "ready", f"{counted(len(pools), 'pool')}, {counted(sessions, 'session')}" if pools else NO_POOL


def live_sessions(directory: Directory, pool: HostedPool | None = None) -> Iterator[HostedSession]:
    """The sessions that are not lost; of one pool, if given."""
    return (
        session
        for session in directory.sessions()
        if session.status.state != "lost" and (pool is None or session.pool == pool.name)
    )


def rank_views(
    directory: Directory, pool: HostedPool | None = None, session_id: str | None = None
) -> tuple[RankView, ...]:
    """The ranks of these sessions, without those of lost ones."""
    return tuple(
        RankView.of(rank, session)
        for session in live_sessions(directory, pool)
        if session_id in (None, session.session_id)
        for rank in session.status.ranks
    )
