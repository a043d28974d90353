"""The engine: readiness, counters, ranks, transfers, drain and bypass."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, HTTPException, Path, Query
from pydantic import WithJsonSchema
from starlette.concurrency import run_in_threadpool

from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.messages import DesiredState, RankReport
from kvstow.status import BypassStatus, DrainStatus, RankStatus, Readiness
from kvstow_api.appstate import App
from kvstow_api.bodies import REPORT_SCHEMA, BypassBody, DrainBody
from kvstow_api.openapi import changing, reading
from kvstow_api.queries import StatsQuery, TransfersQuery
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views import RanksView, StatsView, TransfersView

router = APIRouter(prefix="/v1", tags=["engine"], route_class=StrictRoute)

RankNumber = Annotated[int, Path(ge=0, description="Its number, from 0")]
Clock = Annotated[
    str | None, Header(alias="X-KVStow-Clock", description="The rank's time of day, in seconds since 1970")
]
Report = Annotated[dict[str, Any], Body(), WithJsonSchema(REPORT_SCHEMA)]

_SCANNED = 2000  # ops searched for those of one direction or state: some ms with the engine's lock held
_DRAIN_ALL = DrainBody(deadline_seconds=None)


@router.get("/readiness", responses=reading())
async def get_readiness(app: App) -> Readiness:
    """The state of the engine and of each rank."""
    return app.engine.readiness()


@router.get("/stats", responses=reading())
async def get_stats(app: App, query: Annotated[StatsQuery, Query()]) -> StatsView:
    """One consistent snapshot of the counters."""
    stats = app.engine.stats()
    return StatsView(state=stats.state, **{name: getattr(stats, name) for name in query.sections})


@router.get("/ranks", responses=reading())
async def list_ranks(app: App) -> RanksView:
    """All ranks."""
    return RanksView(items=list(app.engine.readiness().ranks))


@router.get("/ranks/{rank}", responses=reading(404))
async def get_rank(app: App, rank: RankNumber) -> RankStatus:
    """One rank."""
    ranks = app.engine.readiness().ranks
    if rank >= len(ranks):
        raise NotFoundError(f"rank is {rank}; allowed: 0 to {len(ranks) - 1}")
    return ranks[rank]


@router.post("/ranks/{rank}/report", responses=changing(404), openapi_extra={"security": [{"token": []}]})
async def report(app: App, rank: RankNumber, body: Report, clock: Clock = None) -> DesiredState:
    """Take a rank's report and answer with the desired state of the rank."""
    message = RankReport.from_json(body)
    if message.rank != rank:
        raise InvalidRequestError(f"RankReport.rank is {message.rank}; allowed: {rank}, as in the path")
    app.clocks.note(rank, clock)
    # a rank that has restarted makes this take as long as removing all blocks
    take_report = app.host.directory.take_report
    if take_report is None:
        raise HTTPException(401, "ranks report over their attach socket here, and nobody may report over HTTP")
    return await run_in_threadpool(take_report, message)


@router.get("/transfers", responses=reading())
async def list_transfers(app: App, query: Annotated[TransfersQuery, Query()]) -> TransfersView:
    """Loads and stores in flight, the oldest first. A direction or state is searched among the oldest 2,000.
    `pending` counts all."""
    narrowed = query.direction or query.state
    found = app.engine.transfers(_SCANNED if narrowed else query.slowest)
    chosen = (item for item in found if query.direction in (None, item.direction) and query.state in (None, item.state))
    return TransfersView(
        pending=app.engine.stats().transfers.pending,
        items=list(islice(chosen, query.slowest)),
    )


@router.get("/drain", responses=reading())
async def get_drain(app: App) -> DrainStatus:
    """Whether the engine drains, and what is still in flight."""
    return app.engine.admin.drain_status


@router.put("/drain", responses=changing())
async def start_drain(app: App, body: DrainBody = _DRAIN_ALL) -> DrainStatus:
    """Start a drain, or change the current one: transfers in flight end, and no new ones begin. `/readyz` fails from
    now on."""
    return app.engine.admin.drain(body.mode, body.deadline_seconds)


@router.delete("/drain", responses=changing(body=False))
async def end_drain(app: App) -> DrainStatus:
    """Accept traffic again."""
    return app.engine.admin.undrain()


@router.get("/bypass", responses=reading())
async def get_bypass(app: App) -> BypassStatus:
    """Which direction is switched off."""
    return app.engine.admin.bypass


@router.put("/bypass", responses=changing())
async def set_bypass(app: App, body: BypassBody) -> BypassStatus:
    """Switch loads or stores off, and leave the pool as it is. A direction that is left out is on."""
    load, store = bool(body.load), bool(body.store)
    ttl = body.ttl_seconds if load or store else None  # nothing is off, so nothing returns
    return app.engine.admin.set_bypass(load=load, store=store, ttl_seconds=ttl)
