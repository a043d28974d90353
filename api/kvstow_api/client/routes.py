"""The routes of the API for `Client.call`. Written by `python -m kvstow_api.routes.clienttable`."""

from __future__ import annotations

from kvstow import stats, status
from kvstow_api import answers
from kvstow_api.client.client import ProbeResult, Route

livez = Route("GET", "/livez", ProbeResult)
readyz = Route("GET", "/readyz", ProbeResult)
startupz = Route("GET", "/startupz", ProbeResult)
metrics = Route("GET", "/metrics", str)
get_overview = Route("GET", "/v1/overview", answers.OverviewView)
get_info = Route("GET", "/v1/info", answers.InfoView)
get_log_levels = Route("GET", "/v1/loglevel", answers.LogLevelsView)
set_log_level = Route("PUT", "/v1/loglevel", answers.LogLevelView)
get_doctor = Route("GET", "/v1/doctor", answers.DoctorView)
get_readiness = Route("GET", "/v1/readiness", answers.ReadinessView)
get_stats = Route("GET", "/v1/stats", stats.EngineStats)
list_ranks = Route("GET", "/v1/ranks", answers.RanksView)
get_rank = Route("GET", "/v1/ranks/{rank}", status.RankStatus)
list_transfers = Route("GET", "/v1/transfers", answers.TransfersView)
get_drain = Route("GET", "/v1/drain", status.DrainStatus)
start_drain = Route("PUT", "/v1/drain", status.DrainStatus)
end_drain = Route("DELETE", "/v1/drain", status.DrainStatus)
get_bypass = Route("GET", "/v1/bypass", status.BypassStatus)
set_bypass = Route("PUT", "/v1/bypass", status.BypassStatus)
list_pools = Route("GET", "/v1/pools", answers.PoolsView)
get_pool = Route("GET", "/v1/pools/{pool}", answers.PoolView)
get_pool_curve = Route("GET", "/v1/pools/{pool}/curve", answers.PoolCurveView)
change_pool: Route[answers.PoolView | answers.OperationView] = Route(
    "PATCH", "/v1/pools/{pool}", answers.PoolView, operation=True
)
delete_pool = Route("DELETE", "/v1/pools/{pool}", answers.DeletedPoolView)
evict: Route[answers.RemovedView | answers.OperationView] = Route(
    "POST", "/v1/pools/{pool}/evict", answers.RemovedView, operation=True
)
purge: Route[answers.RemovedView | answers.OperationView] = Route(
    "POST", "/v1/pools/{pool}/purge", answers.RemovedView, operation=True
)
retry = Route("POST", "/v1/pools/{pool}/retry", answers.PinningView)
list_blocks = Route("GET", "/v1/pools/{pool}/blocks", answers.BlocksView)
get_block = Route("GET", "/v1/pools/{pool}/blocks/{key}", status.BlockStatus)
remove_block = Route("DELETE", "/v1/pools/{pool}/blocks/{key}", type(None))
lookup = Route("POST", "/v1/lookup", status.LookupResult)
list_contexts = Route("GET", "/v1/contexts", answers.ContextsView)
get_context = Route("GET", "/v1/contexts/{context}", answers.ContextView)
change_context = Route("PATCH", "/v1/contexts/{context}", answers.ContextView)
release_context = Route("DELETE", "/v1/contexts/{context}", answers.ContextBlocksView)
prefetch_context = Route("POST", "/v1/contexts/{context}/prefetch", answers.ContextBlocksView)
list_sessions = Route("GET", "/v1/sessions", answers.SessionsView)
detach_session = Route("DELETE", "/v1/sessions/{session_id}", answers.DetachView)
list_namespaces = Route("GET", "/v1/namespaces", answers.NamespacesView)
get_tier = Route("GET", "/v1/tier", answers.TierView)
list_operations = Route("GET", "/v1/operations", answers.OperationsView)
get_operation = Route("GET", "/v1/operations/{operation_id}", answers.OperationView)
forget_operation = Route("DELETE", "/v1/operations/{operation_id}", type(None))
cancel_operation = Route("POST", "/v1/operations/{operation_id}/cancel", answers.OperationView)
