"""The routes about engines: readiness, counters, ranks, transfers, drain and bypass, sessions, namespaces, and the
store below the pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Body, HTTPException, Path, Query, Response
from starlette.concurrency import run_in_threadpool

from kvstow.attach.calls import Desired, Report
from kvstow.attach.wire import CONTENT_TYPE
from kvstow.errors import ConflictError, InvalidRequestError, NotFoundError, ProtocolError
from kvstow.messages import Direction
from kvstow.stats import EngineStats
from kvstow.status import BypassStatus, DrainStatus, RankStatus, TransferState, TransferStatus
from kvstow_api.answers import (
    DetachView,
    NamespacesView,
    RanksView,
    ReadinessView,
    SessionsView,
    TierView,
    TransfersView,
)
from kvstow_api.appstate import App, AppState
from kvstow_api.bodies import BypassBody, DrainBody
from kvstow_api.directory import HostedPool, Switches, host_readiness, live_ranks
from kvstow_api.openapi import changing, reading
from kvstow_api.queries import AnyPool, ChosenPool, Session, StrictRouter
from kvstow_api.readings import sessions_now, tier_view, transfers_view

router = StrictRouter(prefix="/v1", tags=["engine"])

Packed = Annotated[bytes, Body(media_type=CONTENT_TYPE)]
RankNumber = Annotated[int, Path(ge=0, description="Its number, from 0")]

_SCANNED = 2000  # how many ops are searched for a direction or state; some ms, with the engine's lock held
_DRAIN_ALL = DrainBody(deadline_seconds=None)


@router.get("/readiness", responses=reading(404))
async def get_readiness(app: App, pool: AnyPool) -> ReadinessView:
    """Show the state of the host, or of one pool, and of each rank, and what is wrong with them."""
    view = host_readiness(app.directory, pool)
    found = app.conditions.find().conditions
    return replace(
        view,
        memory=replace(view.memory, orphaned_bytes=app.watch.measured.orphaned_bytes),
        conditions=[one for one in found if pool is None or one.pool == pool.name],
    )


@router.get("/stats", responses=reading(404, 409))
async def get_stats(pool: ChosenPool) -> EngineStats:
    """Show the counters of a pool, in one consistent snapshot."""
    return pool.facade.stats()


@router.get("/ranks", responses=reading(404))
async def list_ranks(app: App, pool: AnyPool, session: Session = None) -> RanksView:
    """List the ranks of all engines, of the engines of one pool, or of one engine."""
    return RanksView(items=list(live_ranks(app.directory, pool, session)))


@router.get("/ranks/{rank}", responses=reading(404, 409))
async def get_rank(app: App, rank: RankNumber, pool: AnyPool, session: Session = None) -> RankStatus:
    """Show one rank. The answer is 409 if several engines have a rank of this number: `session` chooses one."""
    ranks = live_ranks(app.directory, pool, session)
    found = [one for one in ranks if one.rank == rank]
    if not found:
        numbers = sorted({one.rank for one in ranks})
        allowed = f"allowed: 0 to {numbers[-1]}" if numbers else "no engine is attached"
        raise NotFoundError(f"rank is {rank}; {allowed}")
    if len(found) > 1:
        sessions = ", ".join(one.session for one in found)
        raise ConflictError(f"{len(found)} engines have a rank {rank}; add ?session= with one of {sessions}")
    return found[0]


@router.post("/ranks/{rank}/report", include_in_schema=False)
async def report(app: App, rank: RankNumber, body: Packed) -> Response:
    """Take the report of a rank on another host, and answer with its desired state. Both are the bytes that ranks of
    this host exchange with the engine over a Unix socket, so the OpenAPI document does not have them."""
    take_report = app.directory.take_report
    if take_report is None:
        raise HTTPException(
            401,
            "ranks report over the attach socket here, and the server takes no report over HTTP",
            {"WWW-Authenticate": "Bearer"},
        )
    try:
        message = Report.unpack(body)
    except ProtocolError as error:
        raise InvalidRequestError(str(error)) from error
    if message.report.rank != rank:
        raise InvalidRequestError(f"RankReport.rank is {message.report.rank}; allowed: {rank}, as in the path")
    app.clocks.note(rank, message.clock)
    # In a thread, because removing all blocks of a restarted rank may take long.
    desired = await run_in_threadpool(take_report, message.report)
    return Response(Desired(desired).pack(), media_type=CONTENT_TYPE)


@router.get("/transfers", responses=reading(404))
async def list_transfers(
    app: App,
    pool: AnyPool,
    session: Session = None,
    direction: Annotated[Direction | None, Query(description="Only transfers of this direction")] = None,
    state: Annotated[TransferState | None, Query(description="Only transfers in this state")] = None,
    slowest: Annotated[int, Query(ge=1, le=1000, description="How many, of the oldest ones")] = 100,
) -> TransfersView:
    """List loads and stores in flight, of all pools or one, the oldest first. Transfers of a direction, a state or a
    session are searched among the oldest 2,000 of each pool. `pending` counts those of all these pools."""
    pools = app.directory.pools() if pool is None else [pool]
    if not (direction or state or session):
        return transfers_view(pools, slowest)

    def is_wanted(item: TransferStatus) -> bool:
        return direction in (None, item.direction) and state in (None, item.state) and session in (None, item.session)

    return transfers_view(pools, slowest, scanned=_SCANNED, wanted=is_wanted)


@router.get("/drain", responses=reading(404))
async def get_drain(app: App, pool: AnyPool) -> DrainStatus:
    """Show whether the host or the pool drains, and what is still in flight."""
    return _switches(app, pool).drain_status


@router.put("/drain", responses=changing(404))
async def start_drain(app: App, pool: AnyPool, body: DrainBody = _DRAIN_ALL) -> DrainStatus:
    """Start a drain, or change the current one. Transfers in flight end, and no new ones begin. Without `pool`, the
    whole host drains, and `/readyz` fails from now on."""
    return _switches(app, pool).drain(body.mode, body.deadline_seconds)


@router.delete("/drain", responses=changing(404, body=False))
async def end_drain(app: App, pool: AnyPool) -> DrainStatus:
    """End a drain, and accept traffic again."""
    return _switches(app, pool).undrain()


@router.get("/bypass", responses=reading(404))
async def get_bypass(app: App, pool: AnyPool) -> BypassStatus:
    """Show which directions are switched off."""
    return _switches(app, pool).bypass


@router.put("/bypass", responses=changing(404))
async def set_bypass(app: App, pool: AnyPool, body: BypassBody) -> BypassStatus:
    """Switch loads or stores off, and leave the blocks as they are. A direction that is left out is switched on."""
    load, store = bool(body.load), bool(body.store)
    ttl = body.ttl_seconds if load or store else None  # with nothing off, there is nothing to switch on later
    return _switches(app, pool).set_bypass(load=load, store=store, ttl_seconds=ttl)


def _switches(app: AppState, pool: HostedPool | None) -> Switches:
    return app.directory.switches if pool is None else pool.facade.admin


# -- engines that use the pools, and their namespaces -----------------------------------------------------------------


sessions_router = StrictRouter(prefix="/v1", tags=["sessions"])

SessionId = Annotated[str, Path(description="As in the list", examples=["7c1e4f0a9b2d3c58"])]


@sessions_router.get("/sessions", responses=reading())
async def list_sessions(app: App) -> SessionsView:
    """List all sessions, the oldest first, including lost ones."""
    return SessionsView(items=sessions_now(app.directory, app.sampler), rejected=dict(app.directory.rejected))


@sessions_router.delete("/sessions/{session_id}", status_code=202, responses=changing(404, 409, body=False))
async def detach_session(
    app: App,
    session_id: SessionId,
    kill: Annotated[bool, Query(description="Kill the engine's processes, too")] = False,
) -> DetachView:
    """Detach an engine: its connections end at once. What the session holds is freed when its processes have ended, and
    not before, because until then they may still copy. `kill` ends them."""
    if not await run_in_threadpool(app.directory.detach, session_id, kill=kill):
        raise NotFoundError(f"there is no session {session_id!r}; /v1/sessions lists them")
    return DetachView(id=session_id, killed=kill)


@sessions_router.get("/namespaces", responses=reading())
async def list_namespaces(app: App) -> NamespacesView:
    """List all namespaces. Engines in the same namespace share blocks."""
    return NamespacesView(items=list(app.directory.namespaces()))


# -- the store below the pools ----------------------------------------------------------------------------------------


tier_router = StrictRouter(prefix="/v1/tier", tags=["tier"])


@tier_router.get("", responses=reading())
async def get_tier(app: App) -> TierView:
    """Show the store below the pools, and for each pool what goes to it and comes from it, and why. Without a store,
    `items` is empty."""
    return tier_view(app.directory)
