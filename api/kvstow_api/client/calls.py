"""The requests of the admin API: a function for each, which returns a `Call`.

Keys of blocks are hex text, as in the API's answers. `pool` names a pool; that of an embedded engine is `host`. A call
without one asks for the only pool, or for the whole host.

`wait`: how many seconds (at most 30) the server may wait for the
work to be done before it answers with the operation. `key` is the Idempotency-Key: a request that is sent again with
the same key gets the first answer again and is not carried out twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from kvstow.messages import DesiredState, Direction, RankReport
from kvstow.status import (
    BlockStatus,
    BypassStatus,
    DrainStatus,
    LookupResult,
    ProtectionResult,
    TransferState,
)
from kvstow.tier.writepolicy import WriteMode
from kvstow_api.client.call import (
    Call,
    Reply,
    decoded,
    fields,
    get,
    idempotent,
    if_matching,
    nothing,
    params,
    work,
)
from kvstow_api.history import HistoryView
from kvstow_api.views import (
    POOL_NAME,
    BlockState,
    BlocksView,
    ConfigView,
    DetachView,
    DoctorView,
    InfoView,
    LogLevelsView,
    LogLevelView,
    NamespacesView,
    OperationKind,
    OperationState,
    OperationsView,
    OperationView,
    PinningView,
    PlanView,
    PoolsView,
    PoolView,
    RanksView,
    RankView,
    ReadinessView,
    RemovedView,
    Section,
    SessionsView,
    StatsView,
    TierBypassView,
    TierPurgedView,
    TierView,
    TransfersView,
)

_PATIENCE = 60.0
"""Seconds that calls to a store which are under way may take."""

ProbeName = Literal["livez", "readyz", "startupz"]


def _path_of(pool: str) -> str:
    return f"/v1/pools/{quote(pool, safe='')}"


class ProbeResult(NamedTuple):
    """Whether the probe passed, and its text."""

    ok: bool
    text: str


# -- the server ----------------------------------------------------------------------------------------------------


def info() -> Call[InfoView]:
    return get("/v1/info", InfoView)


def readiness(*, pool: str | None = None) -> Call[ReadinessView]:
    """Of the host, or of one pool."""
    return get("/v1/readiness", ReadinessView, pool=pool)


def stats(*sections: Section, pool: str | None = None) -> Call[StatsView]:
    return get("/v1/stats", StatsView, section=",".join(sections), pool=pool)


def history(*, pool: str | None = None) -> Call[HistoryView]:
    return get("/v1/history", HistoryView, pool=pool)


def doctor() -> Call[DoctorView]:
    return get("/v1/doctor", DoctorView)


def probe(name: ProbeName, *, verbose: bool = True, exclude: Iterable[str] = ()) -> Call[ProbeResult]:
    given = params(verbose=verbose or None, exclude=",".join(exclude))
    return Call("GET", f"/{name}", _probe_result, given, accepts=frozenset({503}))


def metrics() -> Call[str]:
    return Call("GET", "/metrics", lambda reply: reply.body.decode())


# -- pools ---------------------------------------------------------------------------------------------------------


def pools() -> Call[PoolsView]:
    return get("/v1/pools", PoolsView)


def pool(name: str = POOL_NAME) -> Call[PoolView]:
    return get(_path_of(name), PoolView)


def delete_pool(name: str) -> Call[None]:
    """Fails with status 409 while the pool has sessions."""
    return Call("DELETE", _path_of(name), nothing)


def change_pool(
    settings: Mapping[str, Any],
    *,
    if_match: str | None = None,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[PoolView | OperationView]:
    """`settings`: new values by name, such as `policy`; what is left out stays. `if_match`: an `etag` seen before."""
    return work("PATCH", _path_of(pool), PoolView, wait, dict(settings), if_matching(if_match))


def plan_pool(settings: Mapping[str, Any], *, pool: str = POOL_NAME) -> Call[PlanView]:
    """What `change_pool` would do now."""
    return Call("PATCH", _path_of(pool), decoded(PlanView), body={**settings, "dry_run": True})


def resize(
    *,
    slots: int | None = None,
    num_bytes: int | None = None,
    if_match: str | None = None,
    wait: float | None = None,
    pool: str = POOL_NAME,
) -> Call[PoolView | OperationView]:
    """Set the pool's size on each rank, in slots or bytes."""
    settings = fields(capacity_slots=slots, capacity_bytes=num_bytes)
    return change_pool(settings, if_match=if_match, wait=wait, pool=pool)


def plan_resize(*, slots: int | None = None, num_bytes: int | None = None, pool: str = POOL_NAME) -> Call[PlanView]:
    """What `resize` would do now."""
    return plan_pool(fields(capacity_slots=slots, capacity_bytes=num_bytes), pool=pool)


def set_policy(policy: str, *, if_match: str | None = None, pool: str = POOL_NAME) -> Call[PoolView]:
    return Call("PATCH", _path_of(pool), decoded(PoolView), body={"policy": policy}, headers=if_matching(if_match))


def evict(
    *,
    slots: int | None = None,
    num_bytes: int | None = None,
    idle_seconds: float | None = None,
    dry_run: bool = False,
    wait: float | None = None,
    key: str | None = None,
    pool: str = POOL_NAME,
) -> Call[RemovedView | OperationView]:
    """Remove the coldest blocks. Takes exactly one of the first three arguments."""
    body = fields(slots=slots, bytes=num_bytes, idle_seconds=idle_seconds, dry_run=dry_run)
    return work("POST", f"{_path_of(pool)}/evict", RemovedView, wait, body, idempotent(key))


def purge(
    *,
    everything: bool = False,
    keys: Sequence[str] | None = None,
    key_prefixes: Sequence[str] | None = None,
    idle_seconds: float | None = None,
    age_seconds: float | None = None,
    slots: int | None = None,
    num_bytes: int | None = None,
    dry_run: bool = False,
    wait: float | None = None,
    key: str | None = None,
    pool: str = POOL_NAME,
) -> Call[RemovedView | OperationView]:
    """Remove blocks by key, age or number. Takes exactly one selector."""
    body = fields(
        all=everything or None,
        keys=keys,
        key_prefixes=key_prefixes,
        idle_seconds=idle_seconds,
        age_seconds=age_seconds,
        slots=slots,
        bytes=num_bytes,
        dry_run=dry_run,
    )
    return work("POST", f"{_path_of(pool)}/purge", RemovedView, wait, body, idempotent(key))


def protect(
    keys: Sequence[str], *, ttl_seconds: float | None = None, key: str | None = None, pool: str = POOL_NAME
) -> Call[ProtectionResult]:
    body = {"keys": list(keys), "ttl_seconds": ttl_seconds}
    return Call("POST", f"{_path_of(pool)}/protect", decoded(ProtectionResult), body=body, headers=idempotent(key))


def unprotect(keys: Sequence[str] | None, *, key: str | None = None, pool: str = POOL_NAME) -> Call[ProtectionResult]:
    """None: all blocks."""
    body = {"all": True} if keys is None else {"keys": list(keys)}
    return Call("POST", f"{_path_of(pool)}/unprotect", decoded(ProtectionResult), body=body, headers=idempotent(key))


def retry_pinning(*, key: str | None = None, pool: str = POOL_NAME) -> Call[PinningView]:
    """Let ranks whose pinning failed try again."""
    return Call("POST", f"{_path_of(pool)}/retry", decoded(PinningView), headers=idempotent(key))


def pause_pinning(*, pool: str = POOL_NAME) -> Call[PoolView]:
    """Ranks pin no further chunk."""
    return Call("PATCH", _path_of(pool), decoded(PoolView), body={"pinning_paused": True})


def resume_pinning(*, pool: str = POOL_NAME) -> Call[PoolView]:
    return Call("PATCH", _path_of(pool), decoded(PoolView), body={"pinning_paused": False})


# -- blocks --------------------------------------------------------------------------------------------------------


def blocks(
    *,
    state: BlockState | None = None,
    namespace: str | None = None,
    page_size: int | None = None,
    page_token: str | None = None,
    pool: str = POOL_NAME,
) -> Call[BlocksView]:
    given = {"state": state, "namespace": namespace, "page_size": page_size, "page_token": page_token}
    return get(f"{_path_of(pool)}/blocks", BlocksView, **given)


def block(key: str, *, pool: str = POOL_NAME) -> Call[BlockStatus]:
    return get(f"{_path_of(pool)}/blocks/{quote(key, safe='')}", BlockStatus)


def remove_block(key: str, *, pool: str = POOL_NAME) -> Call[None]:
    """Fails with status 409 while the block is in use or protected."""
    return Call("DELETE", f"{_path_of(pool)}/blocks/{quote(key, safe='')}", nothing)


def lookup(keys: Sequence[str], *, pool: str | None = None) -> Call[LookupResult]:
    """Which of the keys are in the pool. Holds no block and is not counted. At most 4,096 keys; more than
    64 KiB of them need an admin's credential or the Unix socket."""
    return Call("POST", "/v1/lookup", decoded(LookupResult), params(pool=pool), body={"keys": list(keys)})


# -- ranks and transfers -------------------------------------------------------------------------------------------


def ranks(*, pool: str | None = None, session: str | None = None) -> Call[RanksView]:
    """Of all engines, of those of one pool, or of one engine."""
    return get("/v1/ranks", RanksView, pool=pool, session=session)


def rank(number: int, *, pool: str | None = None, session: str | None = None) -> Call[RankView]:
    """Fails with status 409 if several of these engines have a rank of this number."""
    return get(f"/v1/ranks/{number}", RankView, pool=pool, session=session)


def report(message: RankReport, *, clock: float) -> Call[DesiredState]:
    """The report of a rank's agent. `clock`: its time of day, in seconds since 1970, which the server compares."""
    return Call(
        "POST",
        f"/v1/ranks/{message.rank}/report",
        lambda reply: DesiredState.from_json(json.loads(reply.body)),
        body=message.to_json(),
        headers={"X-KVStow-Clock": f"{clock:.6f}"},
    )


def transfers(
    *,
    direction: Direction | None = None,
    state: TransferState | None = None,
    slowest: int | None = None,
    pool: str | None = None,
    session: str | None = None,
) -> Call[TransfersView]:
    """Of all pools, of one, or of one engine."""
    given = {"direction": direction, "state": state, "slowest": slowest, "pool": pool, "session": session}
    return get("/v1/transfers", TransfersView, **given)


# -- sessions and namespaces ---------------------------------------------------------------------------------------


def sessions() -> Call[SessionsView]:
    return get("/v1/sessions", SessionsView)


def detach(session_id: str, *, kill: bool = False) -> Call[DetachView]:
    """End an engine's connections, and kill its processes if asked to. What it holds is freed when its processes have
    ended; then `sessions` does not list it any more."""
    path = f"/v1/sessions/{quote(session_id, safe='')}"
    return Call("DELETE", path, decoded(DetachView), params(kill=kill or None))


def namespaces() -> Call[NamespacesView]:
    return get("/v1/namespaces", NamespacesView)


# -- drain and bypass ----------------------------------------------------------------------------------------------


def drain_status(*, pool: str | None = None) -> Call[DrainStatus]:
    return get("/v1/drain", DrainStatus, pool=pool)


def drain(
    *,
    mode: Literal["stop_stores", "all"] = "all",
    deadline_seconds: float | None = None,
    pool: str | None = None,
) -> Call[DrainStatus]:
    """All pools, or one."""
    body = {"mode": mode, "deadline_seconds": deadline_seconds}
    return Call("PUT", "/v1/drain", decoded(DrainStatus), params(pool=pool), body=body)


def undrain(*, pool: str | None = None) -> Call[DrainStatus]:
    return Call("DELETE", "/v1/drain", decoded(DrainStatus), params(pool=pool))


def bypass_status(*, pool: str | None = None) -> Call[BypassStatus]:
    return get("/v1/bypass", BypassStatus, pool=pool)


def bypass(*, load: bool, store: bool, ttl_seconds: float | None = None, pool: str | None = None) -> Call[BypassStatus]:
    """Switch directions off in all pools, or in one; both False switches both on."""
    body = {"load": load, "store": store, "ttl_seconds": ttl_seconds}
    return Call("PUT", "/v1/bypass", decoded(BypassStatus), params(pool=pool), body=body)


# -- the fleet tier ------------------------------------------------------------------------------------------------


def tier() -> Call[TierView]:
    return get("/v1/tier", TierView)


def attach_tier(url: str, *, write: WriteMode | None = None, key: str | None = None) -> Call[TierView]:
    """Use a store. Fails with status 409 if one is attached, or none can be."""
    body = fields(url=url, write=write)
    return Call("POST", "/v1/tier/attach", decoded(TierView), body=body, headers=idempotent(key), patience=_PATIENCE)


def detach_tier(*, key: str | None = None) -> Call[TierView]:
    """Use no store any more. Answered when nothing touches the pools' memory for it."""
    return Call("POST", "/v1/tier/detach", decoded(TierView), headers=idempotent(key), patience=_PATIENCE)


def bypass_tier(*, bypassed: bool, ttl_seconds: float | None = None, pool: str | None = None) -> Call[TierBypassView]:
    """Leave the store alone in all pools or in one, or use it again."""
    body = {"bypassed": bypassed, "ttl_seconds": ttl_seconds}
    return Call("PUT", "/v1/tier/bypass", decoded(TierBypassView), params(pool=pool), body=body)


def purge_tier(
    fingerprint: str, *, wait: float | None = None, key: str | None = None
) -> Call[TierPurgedView | OperationView]:
    """Remove all objects of a fingerprint from the store, for all nodes that use it."""
    return work("POST", "/v1/tier/purge", TierPurgedView, wait, {"fingerprint": fingerprint}, idempotent(key))


def name_tier_weights(
    weights_id: str, *, pool: str | None = None, namespace: str | None = None, key: str | None = None
) -> Call[TierView]:
    """Name the weights that an engine has now, after it has reset its prefix cache."""
    body = fields(weights_id=weights_id, namespace=namespace)
    return Call("POST", "/v1/tier/weights", decoded(TierView), params(pool=pool), body=body, headers=idempotent(key))


# -- operations ----------------------------------------------------------------------------------------------------


def operations(
    *,
    kind: OperationKind | None = None,
    state: OperationState | None = None,
    pool: str | None = None,
    page_size: int | None = None,
    page_token: str | None = None,
) -> Call[OperationsView]:
    given = {"kind": kind, "state": state, "pool": pool, "page_size": page_size, "page_token": page_token}
    return get("/v1/operations", OperationsView, **given)


def operation(operation_id: str, *, wait: float | None = None) -> Call[OperationView]:
    """When it ends, or after `wait` seconds."""
    path = f"/v1/operations/{quote(operation_id, safe='')}"
    return Call("GET", path, decoded(OperationView), params(wait=wait), patience=wait or 0.0)


def cancel(operation_id: str) -> Call[OperationView]:
    return Call("POST", f"/v1/operations/{quote(operation_id, safe='')}/cancel", decoded(OperationView))


def forget(operation_id: str) -> Call[None]:
    """Remove an operation that has ended from the list."""
    return Call("DELETE", f"/v1/operations/{quote(operation_id, safe='')}", nothing)


# -- settings ------------------------------------------------------------------------------------------------------


def config(*, pool: str | None = None) -> Call[ConfigView]:
    return get("/v1/config", ConfigView, pool=pool)


def log_levels() -> Call[LogLevelsView]:
    return get("/v1/loglevel", LogLevelsView)


def set_log_level(level: str, *, logger: str = "kvstow", ttl_seconds: float | None = None) -> Call[LogLevelView]:
    """For `ttl_seconds`, or until the server stops."""
    body = {"logger": logger, "level": level, "ttl_seconds": ttl_seconds}
    return Call("PUT", "/v1/loglevel", decoded(LogLevelView), body=body)


# -- parts ---------------------------------------------------------------------------------------------------------


def _probe_result(reply: Reply) -> ProbeResult:
    return ProbeResult(reply.status == 200, reply.body.decode())
