"""The routes of the API for `Client.call`. Written by `python -m kvstow_api.routes.clienttable`."""

from __future__ import annotations

from kvstow.messages import DesiredState
from kvstow.stats import EngineStats
from kvstow.status import BlockStatus, BypassStatus, DrainStatus, LookupResult, RankStatus
from kvstow_api.answers import (
    BlocksView,
    ContextsView,
    ContextView,
    DetachView,
    DoctorView,
    InfoView,
    LogLevelsView,
    LogLevelView,
    NamespacesView,
    OperationsView,
    OperationView,
    PinningView,
    PoolCurveView,
    PoolsView,
    PoolView,
    PrefetchView,
    RanksView,
    ReadinessView,
    ReleasedView,
    RemovedView,
    SessionsView,
    SourcesView,
    TierView,
    TransfersView,
)
from kvstow_api.client.client import ProbeResult, Route
from kvstow_api.figures import CurvesView

livez = Route("GET", "/livez", ProbeResult)
readyz = Route("GET", "/readyz", ProbeResult)
startupz = Route("GET", "/startupz", ProbeResult)
metrics = Route("GET", "/metrics", str)
get_info = Route("GET", "/v1/info", InfoView)
get_log_levels = Route("GET", "/v1/loglevel", LogLevelsView)
set_log_level = Route("PUT", "/v1/loglevel", LogLevelView)
get_curves = Route("GET", "/v1/curves", CurvesView)
get_doctor = Route("GET", "/v1/doctor", DoctorView)
get_readiness = Route("GET", "/v1/readiness", ReadinessView)
get_stats = Route("GET", "/v1/stats", EngineStats)
list_ranks = Route("GET", "/v1/ranks", RanksView)
get_rank = Route("GET", "/v1/ranks/{rank}", RankStatus)
report = Route("POST", "/v1/ranks/{rank}/report", DesiredState)
list_transfers = Route("GET", "/v1/transfers", TransfersView)
get_drain = Route("GET", "/v1/drain", DrainStatus)
start_drain = Route("PUT", "/v1/drain", DrainStatus)
end_drain = Route("DELETE", "/v1/drain", DrainStatus)
get_bypass = Route("GET", "/v1/bypass", BypassStatus)
set_bypass = Route("PUT", "/v1/bypass", BypassStatus)
list_pools = Route("GET", "/v1/pools", PoolsView)
get_pool = Route("GET", "/v1/pools/{pool}", PoolView)
get_pool_curve = Route("GET", "/v1/pools/{pool}/curve", PoolCurveView)
change_pool: Route[PoolView | OperationView] = Route("PATCH", "/v1/pools/{pool}", PoolView, operation=True)
delete_pool = Route("DELETE", "/v1/pools/{pool}", type(None))
evict: Route[RemovedView | OperationView] = Route("POST", "/v1/pools/{pool}/evict", RemovedView, operation=True)
purge: Route[RemovedView | OperationView] = Route("POST", "/v1/pools/{pool}/purge", RemovedView, operation=True)
retry = Route("POST", "/v1/pools/{pool}/retry", PinningView)
list_blocks = Route("GET", "/v1/pools/{pool}/blocks", BlocksView)
list_sources = Route("GET", "/v1/pools/{pool}/sources", SourcesView)
get_block = Route("GET", "/v1/pools/{pool}/blocks/{key}", BlockStatus)
remove_block = Route("DELETE", "/v1/pools/{pool}/blocks/{key}", type(None))
lookup = Route("POST", "/v1/lookup", LookupResult)
list_contexts = Route("GET", "/v1/contexts", ContextsView)
get_context = Route("GET", "/v1/contexts/{context}", ContextView)
change_context = Route("PATCH", "/v1/contexts/{context}", ContextView)
release_context = Route("DELETE", "/v1/contexts/{context}", ReleasedView)
prefetch_context = Route("POST", "/v1/contexts/{context}/prefetch", PrefetchView)
list_sessions = Route("GET", "/v1/sessions", SessionsView)
detach_session = Route("DELETE", "/v1/sessions/{session_id}", DetachView)
list_namespaces = Route("GET", "/v1/namespaces", NamespacesView)
get_tier = Route("GET", "/v1/tier", TierView)
list_operations = Route("GET", "/v1/operations", OperationsView)
get_operation = Route("GET", "/v1/operations/{operation_id}", OperationView)
forget_operation = Route("DELETE", "/v1/operations/{operation_id}", type(None))
cancel_operation = Route("POST", "/v1/operations/{operation_id}/cancel", OperationView)
