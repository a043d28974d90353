"""Gathers what the doctor examines."""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.appstate import AppState
from kvstow_api.directory import HostedPool
from kvstow_api.doctor.evidence import Evidence, NodeEvidence
from kvstow_api.hostreadiness import host_readiness
from kvstow_api.poolview import session_views

_NO_DRAIN = DrainStatus(
    active=False, mode=None, deadline_seconds_left=None, drained=False, pending_transfers=0, leases=0
)
_NO_BYPASS = BypassStatus(load=False, store=False, ttl_seconds_left=None)


async def gather(app: AppState) -> tuple[Evidence, list[Evidence]]:
    """The evidence of the host and, of a node, that of each pool."""
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
    if not directory.is_node:
        (pool,) = directory.pools()
        return _of_pool(app, whole, pool), []
    node = NodeEvidence(
        memory=directory.memory(),
        sessions=session_views(app),
        namespaces=directory.namespaces(),
        trust_eof=directory.trust_eof,
        orphans=await run_in_threadpool(host.orphaned_memory),
    )
    whole = whole._replace(node=node)
    return whole, [_of_node_pool(app, whole, pool) for pool in directory.pools()]


def _of_pool(app: AppState, whole: Evidence, pool: HostedPool) -> Evidence:
    return whole._replace(
        readiness=pool.facade.readiness(),
        desired=pool.facade.desired(),
        samples=app.sampler.history_of(pool.name).items,
    )


def _of_node_pool(app: AppState, whole: Evidence, pool: HostedPool) -> Evidence:
    """With what is switched off in this pool alone."""
    admin = pool.facade.admin
    drain = _NO_DRAIN if whole.drain.active else admin.drain_status
    bypass = _NO_BYPASS if whole.bypass.load or whole.bypass.store else admin.bypass
    return _of_pool(app, whole, pool)._replace(pool=pool.name, drain=drain, bypass=bypass)
