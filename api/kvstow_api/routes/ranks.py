"""Ranks: what they reported, and where they do."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path
from pydantic import WithJsonSchema
from starlette.concurrency import run_in_threadpool

from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.messages import RankReport
from kvstow_api.openapi import changing, reading
from kvstow_api.schemas.ranks import REPORT_SCHEMA
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.ranks import DesiredView, RanksView, RankView

router = APIRouter(prefix="/v1/ranks", tags=["ranks"], route_class=StrictRoute)

RankNumber = Annotated[int, Path(ge=0, description="Its number, from 0")]
Clock = Annotated[
    str | None, Header(alias="X-KVStow-Clock", description="The rank's time of day, in seconds since 1970")
]
Report = Annotated[dict[str, Any], Body(), WithJsonSchema(REPORT_SCHEMA)]


@router.get("", responses=reading())
async def list_ranks(use: Use) -> RanksView:
    """All ranks."""
    return RanksView(items=[RankView.of(rank) for rank in use.engine.readiness().ranks])


@router.get("/{rank}", responses=reading(404))
async def get_rank(use: Use, rank: RankNumber) -> RankView:
    """One rank."""
    ranks = use.engine.readiness().ranks
    if rank >= len(ranks):
        raise NotFoundError(f"rank is {rank}; allowed: 0 to {len(ranks) - 1}")
    return RankView.of(ranks[rank])


@router.post("/{rank}/report", responses=changing(404), openapi_extra={"security": [{"token": []}]})
async def report(use: Use, rank: RankNumber, body: Report, clock: Clock = None) -> DesiredView:
    """Take a rank's report; answers what is wanted of it."""
    message = RankReport.from_json(body)
    if message.rank != rank:
        raise InvalidRequestError(f"RankReport.rank is {message.rank}; allowed: {rank}, as in the path")
    use.clocks.note(rank, clock)
    # takes as long as removing all blocks does when the rank has restarted
    return DesiredView.of(await run_in_threadpool(use.engine.report, message))
