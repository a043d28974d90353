"""The checks of /readyz that ask a host's pools and sessions. Every check is O(pools + ranks)."""

from __future__ import annotations

from functools import partial

from kvstow.bytesize import format_size
from kvstow.status import RankStatus
from kvstow_api.host import ApiHost
from kvstow_api.hostedtier import HostTier
from kvstow_api.hostreadiness import live_sessions
from kvstow_api.probe import Check


def checks_of(host: ApiHost) -> list[Check]:
    """The start-up grace of an embedded engine's ranks begins now."""
    checks = NodeChecks(host) if host.directory.is_node else EmbeddedChecks(host)
    tier = host.directory.tier
    return [*checks.all(), *([] if tier is None else [Check("tier", partial(_tier_failure, tier), required=False)])]


def _tier_failure(tier: HostTier) -> str | None:
    """What of the store does not work. Never required: requests compute what the store has, and serving goes on."""
    found = []
    for one in tier.tiers():
        if one.status.state == "down":
            found.append(f"{one.namespace} leaves the store alone: {one.status.reason}")
        failed = (client for client in one.clients if client.health.state == "failed")
        found += [f"{client.purpose} of {one.namespace} have failed: {client.health.reason}" for client in failed]
    return "; ".join(found) or None


class EmbeddedChecks:
    """Of the only engine: it serves without the cache while a required check fails."""

    def __init__(self, host: ApiHost) -> None:
        self._host = host
        (pool,) = host.directory.pools()
        self._facade = pool.facade
        self._grace_ends = host.clock() + host.startup_grace

    def all(self) -> list[Check]:
        require = self._host.readiness_require
        return [
            Check("engine", self._engine_failure),
            Check("ranks", self._ranks_failure),
            Check("pool", self._pool_failure, required="pool" in require),
            Check("pinned", self._pinned_failure, required="pinned" in require),
            Check("transfers", self._transfers_failure),
        ]

    def _engine_failure(self) -> str | None:
        readiness = self._facade.readiness()
        if readiness.state in ("draining", "stopped"):
            return f"the engine is {readiness.state}: {readiness.reason}"
        if readiness.state == "degraded" and not self._ranks_failure() and not self._transfers_failure():
            return f"the engine is degraded: {readiness.reason}"  # for a reason that no other check reports
        return None

    def _ranks_failure(self) -> str | None:
        in_grace = self._host.clock() < self._grace_ends
        limit = self._facade.config.report_timeout
        failures = (rank_failure(rank, limit, in_grace) for rank in self._facade.readiness().ranks)
        return "; ".join(failure for failure in failures if failure) or None

    def _pool_failure(self) -> str | None:
        return None if self._facade.readiness().usable_slots else "no slot is usable yet"

    def _pinned_failure(self) -> str | None:
        readiness = self._facade.readiness()
        if readiness.usable_slots >= readiness.capacity_slots:
            return None
        return f"{readiness.usable_slots} of {readiness.capacity_slots} slots are pinned on every rank"

    def _transfers_failure(self) -> str | None:
        pending = self._facade.stats().transfers.pending
        if not pending.stuck:
            return None
        limit = self._facade.config.transfer_timeout
        return f"{pending.stuck} stuck, the oldest for {pending.oldest_seconds:.1f} s (allowed: {limit:g} s)"


class NodeChecks:
    """Of a node. A fault of one engine fails no probe, because the service still serves the others: checks of sessions
    are informational. A fault that only a restart of the service repairs does fail one."""

    def __init__(self, host: ApiHost) -> None:
        self._host, self._directory = host, host.directory

    def all(self) -> list[Check]:
        require = self._host.readiness_require
        return [
            Check("engine", self._node_failure),
            Check("memory", lambda: self._directory.memory().failure),
            Check("pool", self._pool_failure, required="pool" in require),
            Check("pinned", self._populated_failure, required="pinned" in require),
            Check("ranks", self._ranks_failure, required=False),
            Check("transfers", self._transfers_failure, required=False),
        ]

    def _node_failure(self) -> str | None:
        drain = self._directory.switches.drain_status
        if drain.active:
            return f"an operator drains the node (mode {drain.mode})"
        damaged = [pool.name for pool in self._directory.pools() if pool.facade.integrity_error]
        return f"the records of pool {', '.join(damaged)} are inconsistent; see the log" if damaged else None

    def _pool_failure(self) -> str | None:
        used = {session.pool for session in live_sessions(self._directory)}
        empty = [
            pool.name
            for pool in self._directory.pools()
            if pool.name in used and not pool.facade.readiness().usable_slots
        ]
        return f"no slot is usable yet in pool {', '.join(empty)}" if empty else None

    def _populated_failure(self) -> str | None:
        memory = self._directory.memory()
        if memory.populated_bytes >= memory.target_bytes:
            return None
        sizes = f"{format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)}"
        return f"{sizes} of memory are populated"

    def _ranks_failure(self) -> str | None:
        found = []
        for session in live_sessions(self._directory):
            pool = self._directory.find_pool(session.pool)
            if pool is None:  # deleted meanwhile
                continue
            limit, in_grace = pool.facade.config.report_timeout, session.age_seconds < self._host.startup_grace
            failures = (rank_failure(rank, limit, in_grace) for rank in session.status.ranks)
            found += [f"session {session.session_id} ({session.engine}): {one}" for one in failures if one]
        return "; ".join(found) or None

    def _transfers_failure(self) -> str | None:
        stuck = [session for session in self._directory.sessions() if session.status.state == "stuck"]
        words = (
            f"session {one.session_id} ({one.engine}) is stuck, its oldest transfer for "
            f"{one.status.oldest_seconds:.1f} s"
            for one in stuck
        )
        return "; ".join(words) or None


def rank_failure(rank: RankStatus, report_timeout: float, in_grace: bool = False) -> str | None:
    """Why `rank` is not ready, None if it is. During the start-up grace it need not have reported."""
    age = rank.last_report_age_seconds
    if age is None:
        return None if in_grace else f"rank {rank.rank} has never reported"
    if age > report_timeout:
        return f"rank {rank.rank} last reported {age:.1f} s ago (allowed: {report_timeout:g} s)"
    if rank.state in ("degraded", "failed", "stopped"):
        reason = ": ".join(part for part in (rank.error_reason, rank.error) if part)
        return f"rank {rank.rank} is {rank.state}" + (f" ({reason})" if reason else "")
    return None
