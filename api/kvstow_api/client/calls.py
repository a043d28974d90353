"""The requests of the admin API: a function for each, which returns a `Call`.

Keys of blocks are hex text, as in the API's answers. `pool` names a pool; that of an embedded engine is `host`. A call
without one asks for the only pool, or for the whole host.

`wait`: how many seconds (at most 30) the server may wait for the work to be done before it answers with the operation.
"""

from kvstow_api.client.blockcalls import block, blocks, lookup, protect, remove_block, unprotect
from kvstow_api.client.operationcalls import cancel, forget, operation, operations
from kvstow_api.client.poolcalls import (
    change_pool,
    delete_pool,
    evict,
    pause_pinning,
    plan_pool,
    plan_resize,
    pool,
    pools,
    purge,
    resize,
    resume_pinning,
    retry_pinning,
    set_policy,
)
from kvstow_api.client.servercalls import (
    ProbeName,
    ProbeResult,
    curves,
    doctor,
    info,
    log_levels,
    metrics,
    probe,
    readiness,
    set_log_level,
    stats,
    tier,
)
from kvstow_api.client.sessioncalls import detach, namespaces, rank, ranks, report, sessions, transfers
from kvstow_api.client.switchcalls import bypass, bypass_status, drain, drain_status, undrain

__all__ = [
    "ProbeName",
    "ProbeResult",
    "block",
    "blocks",
    "bypass",
    "bypass_status",
    "cancel",
    "change_pool",
    "curves",
    "delete_pool",
    "detach",
    "doctor",
    "drain",
    "drain_status",
    "evict",
    "forget",
    "info",
    "log_levels",
    "lookup",
    "metrics",
    "namespaces",
    "operation",
    "operations",
    "pause_pinning",
    "plan_pool",
    "plan_resize",
    "pool",
    "pools",
    "probe",
    "protect",
    "purge",
    "rank",
    "ranks",
    "readiness",
    "remove_block",
    "report",
    "resize",
    "resume_pinning",
    "retry_pinning",
    "sessions",
    "set_log_level",
    "set_policy",
    "stats",
    "tier",
    "transfers",
    "undrain",
    "unprotect",
]
