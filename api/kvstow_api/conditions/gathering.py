"""Reads what conditions are found from, on the event loop and without waiting."""

from __future__ import annotations

import time

from kvstow.status import BypassStatus, DrainStatus, SessionStatus
from kvstow_api.answers import DoctorView
from kvstow_api.auth import Credentials
from kvstow_api.conditions.evidence import Evidence, NodeEvidence, TierEvidence
from kvstow_api.conditions.table import failures_of, find_conditions
from kvstow_api.directory import HostedPool, TierMeasurements
from kvstow_api.host import ApiHost
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.hostwatch import HostWatch, RankClocks
from kvstow_api.probe import Check
from kvstow_api.readings import sessions_now, tier_view
from kvstow_api.sampler import Sampler

_NO_DRAIN = DrainStatus(
    active=False, mode=None, deadline_seconds_left=None, drained=False, pending_transfers=0, leases=0
)
_NO_BYPASS = BypassStatus(load=False, store=False, ttl_seconds_left=None)


class Conditions:
    """The conditions of one server, from what it measures anyway. Used on the event loop; each call is O(pools +
    sessions + ranks + namespaces). The start-up grace of an embedded engine's ranks begins when it is created."""

    def __init__(
        self,
        host: ApiHost,
        process: list[Check],
        sampler: Sampler,
        watch: HostWatch,
        clocks: RankClocks,
        credentials: Credentials,
    ) -> None:
        """`process`: checks of the host's own process."""
        self._host, self._process = host, process
        self._sampler, self._watch, self._clocks, self._credentials = sampler, watch, clocks, credentials
        self._grace_ends = host.clock() + host.startup_grace

    def find(self) -> DoctorView:
        return find_conditions(*self.gather())

    def failures(self) -> dict[str, str]:
        """Why checks of /readyz fail, by their names."""
        return failures_of(*self.gather())

    def gather(self) -> tuple[Evidence, list[Evidence]]:
        """The evidence of the host, and that of each pool."""
        host, directory, measured = self._host, self._host.directory, self._watch.measured
        sessions = sessions_now(directory, self._sampler)
        failures = ((check.name, check.run()) for check in self._process)
        whole = Evidence(
            failures={name: failure for name, failure in failures if failure},
            readiness=host_readiness(directory),
            sessions=sessions,
            starting=self._starting(sessions),
            drain=directory.switches.drain_status,
            bypass=directory.switches.bypass,
            clock_offsets=self._clocks.offsets(),
            certificate_seconds_left=host.certificate_ends() - time.time() if host.certificate_ends else None,
            exposed_files=self._credentials.exposures,
            host=measured.memory,
        )
        pools = directory.pools()
        if directory.is_node:
            node = NodeEvidence(
                memory=directory.memory(),
                rejected=self._sampler.rejected_lately(),
                namespaces=directory.namespaces(),
                trust_eof=directory.trust_eof,
                orphans=measured.orphans or (),
            )
            whole = whole._replace(node=node)
        if directory.tier is not None:
            pool_bytes = sum(pool.granted_bytes for pool in pools)
            tier = TierEvidence(tier_view(directory), measured.tier or TierMeasurements(), pool_bytes)
            whole = whole._replace(tier=tier)
        return whole, [self._of_pool(whole, pool) for pool in pools]

    def _starting(self, sessions: list[SessionStatus]) -> frozenset[str]:
        host = self._host
        if not host.directory.is_node:
            return frozenset(one.id for one in sessions if host.clock() < self._grace_ends)
        return frozenset(one.id for one in sessions if one.age_seconds < host.startup_grace)

    def _of_pool(self, whole: Evidence, pool: HostedPool) -> Evidence:
        """With what is switched off in this pool alone."""
        facade, admin = pool.facade, pool.facade.admin
        return whole._replace(
            pool=pool.name,
            readiness=host_readiness(self._host.directory, pool),
            sessions=[one for one in whole.sessions if one.pool == pool.name],
            report_timeout=facade.config.report_timeout,
            desired=facade.desired(),
            kept=self._sampler.kept(pool.name),
            recent=self._sampler.recent(pool.name),
            granted_bytes=pool.granted_bytes,
            due_bytes=pool.due_bytes,
            slot_bytes=pool.stored_slot_bytes or facade.config.total_slot_bytes,
            integrity_error=facade.integrity_error,
            drain=_NO_DRAIN if whole.drain.active else admin.drain_status,
            bypass=_NO_BYPASS if whole.bypass.load or whole.bypass.store else admin.bypass,
        )
