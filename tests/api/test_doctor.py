"""Findings of the doctor: each with evidence that causes it, and with evidence that does not."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.api.conftest import AGENT

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import DesiredState
from kvstow.status import BypassStatus, DrainStatus, RankStatus, Readiness
from kvstow.testing.fakes import FakeClock
from kvstow_api.doctor import CHECKS, Evidence, examine
from kvstow_api.figures import Sample
from kvstow_api.measurements import HostMemory, RankClocks
from kvstow_api.probe import Finding, Verdict
from kvstow_api.views.doctor import DoctorView

GIB = 1 << 30
HOST = HostMemory(headroom_bytes=64 * GIB, limit="64 GiB are left", reserve_bytes=64 << 20, huge_pages="madvise")
RANK = RankStatus(
    rank=0,
    boot_id="b",
    state="ready",
    slot_bytes=GIB,
    pinned_slots=8,
    target_slots=8,
    pinned_bytes=8 * GIB,
    target_bytes=8 * GIB,
    pin_rate_bytes_per_second=0.0,
    pin_elapsed_seconds=1.0,
    pin_mode="cuda",
    locked_bytes=8 * GIB,
    resident_bytes=8 * GIB,
    chunks_done=8,
    chunks_total=8,
    chunks_failed=0,
    error_reason=None,
    error=None,
    notice=None,
    pending_ops=0,
    queued_stores=0,
    queued_loads=0,
    uncollected_completions=0,
    stale_desired_states=0,
    store_bytes_total=2 * GIB,
    load_bytes_total=2 * GIB,
    store_busy_seconds=0.1,
    load_busy_seconds=0.1,
    pin_failures={},
    numa_bytes={},
    last_report_age_seconds=0.1,
)
DAY = 86_400


def sample(minutes: float, *, evicted: int = 0, hit: int = 0) -> Sample:
    stats = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8)).stats()
    stats.pool = replace(stats.pool, usable_slots=8)
    stats.lookups.hit_blocks, stats.evictions["capacity"] = hit, evicted
    return Sample(60 * minutes, stats)


def verdict(name: str = "ranks", failure: str | None = None, *, required: bool = True) -> Verdict:
    """Of /readyz, with one check."""
    return Verdict("readyz", (Finding(name, failure, required, excluded=False),))


def evidence(*ranks: RankStatus, **changes: Any) -> Evidence:
    given = ranks or (RANK, replace(RANK, rank=1))
    healthy = Evidence(
        verdict=verdict(),
        readiness=Readiness("ready", "", 8, 8, given),
        desired=DesiredState("e", 8, number=1),
        drain=DrainStatus(False, None, None, False, 0, 0),
        bypass=BypassStatus(load=False, store=False, ttl_seconds_left=None),
        samples=[sample(0), sample(5, evicted=7)],
        clock_offsets={0: 0.5, 1: -1.0},
        host=HOST,
        certificate_seconds_left=7 * DAY,
        exposed_files={},
    )
    return healthy._replace(**changes)


def diagnose(given: Evidence) -> DoctorView:
    """Of an embedded engine: its host and its pool."""
    pool = given._replace(
        pool="host",
        drain=DrainStatus(False, None, None, False, 0, 0),
        bypass=BypassStatus(load=False, store=False, ttl_seconds_left=None),
    )
    return examine(given._replace(desired=None, samples=()), [pool])


def test_a_healthy_engine_has_no_findings() -> None:
    told = diagnose(evidence())
    assert told.findings == []
    assert told.healthy
    assert (set(told.checks), told.skipped) == (set(CHECKS), {})


FIRING = [
    ("readiness", "error", evidence(verdict=verdict("ranks", "rank 1 has never reported"))),
    ("readiness", "error", evidence(verdict=verdict("of the host", "it burns"))),
    ("certificate", "warning", evidence(certificate_seconds_left=7 * DAY - 1)),
    ("certificate", "error", evidence(certificate_seconds_left=0)),
    ("token_files", "warning", evidence(exposed_files={"token_file": "other users may read it (mode 0644)"})),
    ("pinning", "error", evidence(replace(RANK, error_reason="cgroup_limit", error="no memory", pinned_bytes=GIB))),
    ("pinning", "error", evidence(replace(RANK, error_reason="driver", chunks_failed=1))),
    ("pinning", "error", evidence(replace(RANK, error_reason="hugepages", chunks_failed=1))),
    ("memory", "error", evidence(replace(RANK, pinned_bytes=0), host=HOST._replace(headroom_bytes=8 * GIB))),
    ("memory", "warning", evidence(host=HOST._replace(headroom_bytes=(64 << 20) - 1))),
    ("huge_pages", "warning", evidence(host=HOST._replace(huge_pages="never"))),
    ("numa", "warning", evidence(replace(RANK, notice="the pool is not bound to NUMA node 1 of its device: no"))),
    ("memlock", "warning", evidence(replace(RANK, pin_mode="populate", notice="mlock failed; RLIMIT_MEMLOCK is 8"))),
    ("clocks", "warning", evidence(clock_offsets={0: 1.1})),
    ("clocks", "warning", evidence(clock_offsets={0: -30.0})),
    ("links", "warning", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=0.21))),
    ("links", "warning", evidence(RANK, replace(RANK, rank=1, store_busy_seconds=0.21))),
    ("thrashing", "warning", evidence(samples=[sample(0), sample(5, evicted=8)])),
    ("share", "warning", evidence(granted_bytes=2 * GIB - 1, due_bytes=4 * GIB)),
    ("switches", "warning", evidence(bypass=BypassStatus(load=True, store=False, ttl_seconds_left=None))),
    ("switches", "info", evidence(bypass=BypassStatus(load=False, store=True, ttl_seconds_left=5.0))),
    ("switches", "warning", evidence(drain=DrainStatus(True, "all", None, True, 0, 0))),
    ("switches", "info", evidence(desired=DesiredState("e", 8, number=1, paused=True))),
    (
        "switches",
        "warning",
        evidence(
            desired=DesiredState("e", 8, number=1, paused=True), readiness=Readiness("pinning", "", 4, 8, (RANK,))
        ),
    ),
]


@pytest.mark.parametrize(("check", "severity", "given"), FIRING)
def test_a_finding_has_problem_reason_fix_and_evidence(check: str, severity: str, given: Evidence) -> None:
    told = diagnose(given)
    (finding,) = told.findings
    assert (finding.check, finding.severity) == (check, severity)
    assert told.healthy == (severity == "info")
    assert finding.what
    assert finding.why
    assert finding.fix
    assert finding.evidence


SILENT = [
    ("share", evidence(granted_bytes=2 * GIB, due_bytes=4 * GIB)),
    ("readiness", evidence(verdict=verdict("pinned", "4 of 8 slots are pinned on every rank", required=False))),
    ("memory", evidence(replace(RANK, pinned_bytes=0), host=HOST._replace(headroom_bytes=8 * GIB + (64 << 20)))),
    ("memory", evidence(host=HOST._replace(headroom_bytes=64 << 20))),
    ("huge_pages", evidence(host=HOST._replace(huge_pages="always"))),
    ("huge_pages", evidence(host=HOST._replace(huge_pages="reserved"))),
    ("numa", evidence(replace(RANK, notice="something else"))),
    ("memlock", evidence(replace(RANK, pin_mode="populate"))),  # nobody asked for a lock
    ("memlock", evidence(replace(RANK, pin_mode="cuda", locked_bytes=0))),  # the driver needs none
    ("links", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=0.19))),
    ("links", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=9.0, load_bytes_total=GIB - 1))),
    ("thrashing", evidence(samples=[sample(0), sample(5, evicted=20, hit=2)])),
    ("thrashing", evidence(samples=[sample(0, evicted=8), sample(5, evicted=15)])),
]


@pytest.mark.parametrize(("check", "given"), SILENT)
def test_healthy_evidence_has_no_findings(check: str, given: Evidence) -> None:
    assert check in CHECKS
    assert diagnose(given).findings == []


@pytest.mark.parametrize(("huge_pages", "cure"), [("reserved", "vm.nr_hugepages"), ("madvise", "memory limit of the")])
def test_the_fix_for_too_little_memory_fits_the_kind_of_memory(huge_pages: str, cure: str) -> None:
    short = HOST._replace(headroom_bytes=GIB, huge_pages=huge_pages)
    (finding,) = diagnose(evidence(replace(RANK, pinned_bytes=0), host=short)).findings
    assert cure in finding.fix


def test_a_drain_is_one_finding() -> None:
    given = evidence(
        verdict=verdict("engine", "the engine is draining"), drain=DrainStatus(True, "all", None, True, 0, 0)
    )
    assert [finding.check for finding in diagnose(given).findings] == ["switches"]


def test_checks_without_evidence_are_skipped_with_a_reason() -> None:
    unknown = replace(RANK, boot_id=None, state="starting", pinned_bytes=0, target_bytes=0)
    told = diagnose(
        evidence(unknown, samples=[], clock_offsets={}, host=None, certificate_seconds_left=None, exposed_files=None)
    )
    named = {"certificate", "memory", "huge_pages", "numa", "memlock", "clocks", "links", "thrashing", "token_files"}
    assert set(told.skipped) == named
    assert all(told.skipped.values())
    assert set(told.checks) | set(told.skipped) == set(CHECKS)
    assert told.findings == []


def test_the_worst_comes_first() -> None:
    given = evidence(
        replace(RANK, error_reason="driver"),
        desired=DesiredState("e", 8, number=1, paused=True),
        clock_offsets={0: 9.0},
    )
    assert [finding.severity for finding in diagnose(given).findings] == ["error", "warning", "info"]


def test_clocks_are_compared_when_ranks_send_their_time() -> None:
    clocks = RankClocks(now=lambda: 100.0)
    for rank, told in ((0, "103.5"), (1, None), (2, "noon"), (3, "nan"), (4, "inf"), (5, "90")):
        clocks.note(rank, told)
    assert clocks.offsets() == {0: 3.5, 5: -10.0}


@pytest.mark.anyio
async def test_the_route_gathers_the_evidence(launch: Any, ranks: Any) -> None:
    hosts = {"host_memory": lambda: HOST._replace(huge_pages="never"), "certificate_ends": lambda: time.time() + DAY}
    client: httpx.AsyncClient = await launch(**hosts)
    headers = {**AGENT, "X-KVStow-Clock": "0"}
    await client.post("/v1/ranks/0/report", json=ranks.make_report(0).to_json(), headers=headers)
    ranks.engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    body = (await client.get("/v1/doctor")).json()
    assert {finding["check"] for finding in body["findings"]} == {"certificate", "huge_pages", "clocks", "switches"}
    assert set(body["skipped"]) == {"links", "thrashing", "token_files"}


@pytest.mark.anyio
async def test_a_stuck_transfer_is_found(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], clock: FakeClock
) -> None:
    ranks.begin_store(keys[:2])
    clock.advance(60.0)
    ranks.engine.tick()
    body = (await client.get("/v1/doctor")).json()
    assert not body["healthy"]
    assert any("transfers: 1 stuck" in finding["what"] for finding in body["findings"])


@pytest.mark.anyio
async def test_a_host_without_measurements_is_examined(client: httpx.AsyncClient, ranks: Any) -> None:
    body = (await client.get("/v1/doctor")).json()
    assert body["healthy"]
    assert "memory" in body["skipped"]
