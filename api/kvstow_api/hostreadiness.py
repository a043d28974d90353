"""The readiness of a host over all its pools and sessions."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.bytesize import format_size
from kvstow.stats import EngineState
from kvstow.status import RankStatus
from kvstow_api.answers import ReadinessView
from kvstow_api.directory import NO_POOL, Directory, HostedPool
from kvstow_api.texts import counted


def host_readiness(directory: Directory, pool: HostedPool | None = None) -> ReadinessView:
    """Of one pool, or of the whole host. Sizes of memory are the host's in any case. O(pools + ranks)."""
    memory = directory.memory()
    pools = directory.pools() if pool is None else (pool,)
    found = [(one.name, one.facade.readiness()) for one in pools]
    state: EngineState
    if pool is not None or not directory.is_node:
        ((_, only),) = found
        state, reason = only.state, only.reason
    else:
        state, reason = _node_state(directory, [(name, it.state, it.reason) for name, it in found])
    return ReadinessView(
        state=state,
        reason=reason,
        usable_slots=sum(one.usable_slots for _, one in found),
        capacity_slots=sum(one.capacity_slots for _, one in found),
        ranks=live_ranks(directory, pool),
        memory=memory,
    )


def _node_state(directory: Directory, pools: Sequence[tuple[str, EngineState, str]]) -> tuple[EngineState, str]:
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


def live_ranks(
    directory: Directory, pool: HostedPool | None = None, session_id: str | None = None
) -> tuple[RankStatus, ...]:
    """The ranks of the sessions that are not lost; of those of one pool, or of one session, if given."""
    return tuple(
        rank
        for session in directory.sessions()
        if session.state != "lost" and (pool is None or session.pool == pool.name) and session_id in (None, session.id)
        for rank in session.ranks
    )
