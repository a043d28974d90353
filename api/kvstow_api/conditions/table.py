"""The one table of conditions, and the code that gathers its evidence. The doctor, the status page, `kvstow top`,
/readyz and the alerts read this table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from kvstow.status import BypassStatus, DrainStatus, SessionStatus
from kvstow_api.answers import ConditionView, DoctorView, Severity
from kvstow_api.auth import Credentials
from kvstow_api.conditions.evidence import TABLE, Condition, Evidence, NothingToMeasure
from kvstow_api.directory import NO_POOL, HostedPool, host_readiness
from kvstow_api.health import Check
from kvstow_api.host import ApiHost
from kvstow_api.hostwatch import HostWatch, RankClocks
from kvstow_api.journal import LimitedLog
from kvstow_api.readings import curve_view, sessions_now, tier_view
from kvstow_api.sampler import Sampler, keep_calling

logger = logging.getLogger("kvstow.conditions")

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_LOG_SECONDS = 10.0
"""The time between two searches for conditions to log, in seconds."""
_LINES_A_MINUTE = 2
"""The limit for each kind of condition, because some come and go with the traffic."""


def find_conditions(host: Evidence, pools: Sequence[Evidence]) -> DoctorView:
    found: list[ConditionView] = []
    checked: dict[str, None] = {}
    skipped: dict[str, str] = {}
    for condition, evidence in _looks(host, pools):
        try:
            found += _concerned(condition, evidence)
            checked[condition.name] = None
        except NothingToMeasure as reason:
            skipped[condition.name] = _before(evidence) + str(reason)
    if not pools:
        skipped |= {one.name: NO_POOL for one in TABLE if one.of == "pool"}
    return DoctorView(
        time=datetime.now(UTC),
        healthy=all(one.severity == "info" for one in found),
        conditions=sorted(found, key=lambda one: _SEVERITIES.index(one.severity)),
        checked=list(checked),
        skipped={name: reason for name, reason in skipped.items() if name not in checked},
    )


def failures_of(host: Evidence, pools: Sequence[Evidence]) -> dict[str, str]:
    failures: dict[str, list[str]] = {}
    for condition, evidence in _looks(host, pools):
        if condition.checks:
            found = [one.what for one in _concerned(condition, evidence)]
            for check in condition.checks:
                # Pools of a node grow and shrink while it serves, but its memory is populated only once.
                if check != "pinned" or not evidence.is_node or not evidence.pool:
                    failures.setdefault(check, []).extend(found)
    return {check: "; ".join(words) for check, words in failures.items() if words}


def _looks(host: Evidence, pools: Sequence[Evidence]) -> Iterator[tuple[Condition, Evidence]]:
    there = {"host": True, "node": host.is_node, "tier": host.tier.store is not None, "pool": False}
    for condition in TABLE:
        if there[condition.of]:
            yield condition, host
    for pool in pools:
        yield from ((condition, pool) for condition in TABLE if condition.of == "pool")


def _concerned(condition: Condition, evidence: Evidence) -> Iterator[ConditionView]:
    for one in condition.find(evidence):
        pool = evidence.pool or one.pool
        yield replace(one, name=condition.name, pool=pool or None, what=_before(evidence) + one.what)


def _before(evidence: Evidence) -> str:
    return f"pool {evidence.pool}: " if evidence.is_node and evidence.pool else ""


_NO_DRAIN = DrainStatus(
    active=False, mode=None, deadline_seconds_left=None, drained=False, pending_transfers=0, leases=0
)
_NO_BYPASS = BypassStatus(load=False, store=False, ttl_seconds_left=None)


class _Concern(NamedTuple):
    """A kind of condition, and what it concerns."""

    name: str
    pool: str | None
    session: str | None
    rank: int | None


class ConditionLog:
    """Logs the warnings and errors that begin and end, so that the log has what the doctor shows."""

    def __init__(self) -> None:
        self._known: Mapping[_Concern, ConditionView] = {}
        self._logs = {one.name: LimitedLog(logger, burst=_LINES_A_MINUTE) for one in TABLE}

    def note(self, conditions: Sequence[ConditionView]) -> None:
        """Log what has changed since the last call."""
        before = self._known
        self._known = {
            _Concern(one.name, one.pool, one.session, one.rank): one for one in conditions if one.severity != "info"
        }
        for concern, one in self._known.items():
            if concern not in before:
                level = logging.ERROR if one.severity == "error" else logging.WARNING
                self._logs[one.name].log(level, "%s: %s; what helps: %s", one.name, one.what, one.fix)
        for concern, one in before.items():
            if concern not in self._known:
                self._logs[one.name].log(logging.INFO, "%s is over, which said: %s", one.name, one.what)


class Conditions:
    """The conditions of one server, found in figures that it measures anyway. Used on the event loop. Each call is
    O(pools + sessions + ranks + namespaces). The start-up grace of an embedded engine's ranks begins when this object
    is created."""

    def __init__(
        self,
        host: ApiHost,
        process: list[Check],
        sampler: Sampler,
        watch: HostWatch,
        clocks: RankClocks,
        credentials: Credentials,
    ) -> None:
        self._host, self._process = host, process
        self._sampler, self._watch, self._clocks, self._credentials = sampler, watch, clocks, credentials
        self._grace_ends = host.clock() + host.startup_grace
        self._log = ConditionLog()

    async def run(self) -> None:
        """Log conditions that begin and end."""
        await asyncio.sleep(_LOG_SECONDS)
        await keep_calling(self.log_changes, _LOG_SECONDS, logger, "the search for conditions has failed")

    def log_changes(self) -> None:
        self._log.note(self.find().conditions)

    def find(self) -> DoctorView:
        return find_conditions(*self.gather())

    def failures(self) -> dict[str, str]:
        return failures_of(*self.gather())

    def gather(self) -> tuple[Evidence, list[Evidence]]:
        host, directory = self._host, self._host.directory
        sessions, pools = sessions_now(directory, self._sampler), directory.pools()
        failures = ((check.name, check.run()) for check in self._process)
        certificate = None if host.certificate is None else host.certificate()
        whole = Evidence(
            failures={name: failure for name, failure in failures if failure},
            readiness=host_readiness(directory),
            sessions=sessions,
            starting=self._starting(sessions),
            drain=directory.switches.drain_status,
            bypass=directory.switches.bypass,
            clock_offsets=self._clocks.offsets(),
            measured=self._watch.measured,
            certificate_seconds_left=None if certificate is None else certificate.ends - time.time(),
            certificate_is_outdated=certificate is not None and certificate.is_outdated,
            exposed_files=self._credentials.exposures,
            unusable_files=self._credentials.problems,
            is_node=directory.is_node,
            memory=directory.memory(),
            rejected=self._sampler.rejected_lately(),
            namespaces=directory.namespaces(),
            trust_eof=directory.trust_eof,
            user_limits=directory.user_limits(),
            tier=tier_view(directory),
            corrupt=self._sampler.corrupt_lately(),
            granted_bytes=sum(pool.granted_bytes for pool in pools),
        )
        return whole, [self._of_pool(whole, pool) for pool in pools]

    def _starting(self, sessions: list[SessionStatus]) -> frozenset[str]:
        host = self._host
        if not host.directory.is_node:
            return frozenset(one.id for one in sessions if host.clock() < self._grace_ends)
        return frozenset(one.id for one in sessions if one.age_seconds < host.startup_grace)

    def _of_pool(self, whole: Evidence, pool: HostedPool) -> Evidence:
        """Return the evidence of a pool. Its `drain` and `bypass` say what is switched off in this pool alone."""
        facade, admin, samples = pool.facade, pool.facade.admin, self._sampler.of_pool(pool.name)
        return whole._replace(
            pool=pool.name,
            readiness=host_readiness(self._host.directory, pool),
            sessions=[one for one in whole.sessions if one.pool == pool.name],
            report_timeout=facade.config.report_timeout,
            desired=facade.desired(),
            kept=samples.kept,
            recent=samples.recent,
            granted_bytes=pool.granted_bytes,
            due_bytes=pool.due_bytes,
            slot_bytes=pool.stored_slot_bytes or facade.config.total_slot_bytes,
            integrity_error=facade.integrity_error,
            curve=curve_view(self._sampler, pool),
            drain=_NO_DRAIN if whole.drain.active else admin.drain_status,
            bypass=_NO_BYPASS if whole.bypass.load or whole.bypass.store else admin.bypass,
        )
