"""Gathers what the doctor examines."""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.appstate import AppState
from kvstow_api.directory import HostedPool
from kvstow_api.doctor.evidence import Evidence, NodeEvidence, TierEvidence
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.poolview import session_views
from kvstow_api.tierview import tier_view

_NO_DRAIN = DrainStatus(
    active=False, mode=None, deadline_seconds_left=None, drained=False, pending_transfers=0, leases=0
)
_NO_BYPASS = BypassStatus(load=False, store=False, ttl_seconds_left=None)


async def gather(app: AppState) -> tuple[Evidence, list[Evidence]]:
    """The evidence of the host, and that of each pool."""
    host, directory = app.host, app.directory
    whole = Evidence(
        verdict=app.health.probes["readyz"].run(),
        readiness=host_readiness(directory),
        desired=None,
        drain=directory.switches.drain_status,
        bypass=directory.switches.bypass,
        samples=(),
        clock_offsets=app.clocks.offsets(),
        certificate_seconds_left=host.certificate_ends() - time.time() if host.certificate_ends else None,
        exposed_files=app.credentials.exposures,
        host=await run_in_threadpool(host.host_memory) if host.host_memory else None,
    )
    if directory.is_node:
        node = NodeEvidence(
            memory=directory.memory(),
            sessions=session_views(app),
            rejected=directory.rejected,
            namespaces=directory.namespaces(),
            trust_eof=directory.trust_eof,
            orphans=await run_in_threadpool(host.orphaned_memory),
        )
        whole = whole._replace(node=node)
    tier = directory.tier
    if tier is not None:
        pool_bytes = sum(pool.granted_bytes for pool in directory.pools())
        measured = await run_in_threadpool(tier.measure)
        whole = whole._replace(tier=TierEvidence(tier_view(directory), measured, pool_bytes))
    return whole, [_of_pool(app, whole, pool) for pool in directory.pools()]


def _of_pool(app: AppState, whole: Evidence, pool: HostedPool) -> Evidence:
    """With what is switched off in this pool alone."""
    admin = pool.facade.admin
    return whole._replace(
        pool=pool.name,
        readiness=host_readiness(app.directory, pool),
        desired=pool.facade.desired(),
        samples=app.sampler.kept(pool.name),
        granted_bytes=pool.granted_bytes,
        due_bytes=pool.due_bytes,
        drain=_NO_DRAIN if whole.drain.active else admin.drain_status,
        bypass=_NO_BYPASS if whole.bypass.load or whole.bypass.store else admin.bypass,
    )
