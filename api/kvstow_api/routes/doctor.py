"""What is wrong, and what to do about it."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from kvstow_api.doctor import Evidence, examine
from kvstow_api.openapi import reading
from kvstow_api.services import Use
from kvstow_api.strictroute import StrictRoute
from kvstow_api.views.doctor import DoctorView

router = APIRouter(prefix="/v1", tags=["doctor"], route_class=StrictRoute)


@router.get("/doctor", responses=reading())
async def get_doctor(use: Use) -> DoctorView:
    """Findings in words, each with its fix and the numbers behind it, the worst first."""
    evidence = Evidence(
        verdict=use.health.probes["readyz"].run(),
        readiness=use.engine.readiness(),
        desired=use.engine.desired(),
        drain=use.engine.admin.drain_status,
        bypass=use.engine.admin.bypass,
        samples=use.watch.history.items,
        clock_offsets=use.clocks.offsets(),
        certificate_seconds_left=use.context.certificate_ends() - time.time() if use.context.certificate_ends else None,
        exposed_files=use.credentials.exposures,
        host=await run_in_threadpool(use.context.host_memory) if use.context.host_memory else None,
    )
    return examine(evidence)
