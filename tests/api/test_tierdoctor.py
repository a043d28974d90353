"""What the doctor finds of the fleet tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.conftest import CAPACITY, Launch
from tests.api.test_doctor import diagnose, evidence
from tests.api.tieredhost import TieredHost

from kvstow.control.engine import OffloadEngine
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierCounters
from kvstow_api.doctor import TIER_CHECKS
from kvstow_api.doctor.evidence import TierEvidence
from kvstow_api.hostedtier import TierMeasurements
from kvstow_api.views.tier import TierClientView, TierPoolView, TierView

pytestmark = pytest.mark.anyio

MIB = 1 << 20
CLIENT = TierClientView(
    purpose="transfers of rank 0", state="connected", reason="", restarts=0, timeouts=0, corrupt_objects=0,
    put_bytes=0, get_bytes=0,
)  # fmt: skip
POOL = TierPoolView(
    pool="a",
    namespace="a1",
    model="m",
    fingerprint="f",
    state="on",
    reason="",
    breaker="closed",
    fetch_bytes_per_second=1e9,
    lookup_seconds=0.001,
    prefill_tokens_per_second=10_000.0,
    decision="",
    waiting_blocks=0,
    putting_blocks=0,
    fetching_blocks=0,
    dropped_blocks=0,
    breaker_opened=0,
    counters=TierCounters(wait_seconds=5.0, saved_seconds=50.0),
    clients=[CLIENT],
)
OPEN = TierMeasurements(("8.8.8.8",), has_access_control=False)


def tier(measured: TierMeasurements = TierMeasurements(), **changes: Any) -> TierEvidence:  # noqa: B008 - frozen
    view = TierView(
        store="mooncake",
        url="mooncake://m:1",
        items=[POOL, replace(POOL, namespace="a2", **changes)],
    )
    return TierEvidence(view, measured, 100 * MIB)


def client(**changes: Any) -> dict[str, Any]:
    return {"clients": [replace(CLIENT, **changes)]}


FIRING = [
    ("tier", "warning", "no answer in 0.5 s", tier(state="down", breaker="open", reason="no answer in 0.5 s")),
    ("tier", "warning", "a2 of pool a does not use", tier(state="off", reason="the weights were changed")),
    ("tier", "error", "cannot be registered", tier(**client(state="failed", reason="cannot be registered"))),
    (
        "tier_time",
        "warning",
        "waited 51 s for the store, and saved 50 s",
        tier(counters=TierCounters(wait_seconds=51.0, saved_seconds=50.0)),
    ),
    ("tier_objects", "error", "2 objects", tier(**client(corrupt_objects=2))),
    ("tier_access", "warning", "8.8.8.8", tier(OPEN)),
    ("tier_memlock", "warning", "RLIMIT_MEMLOCK is 64 MiB", tier(TierMeasurements((), True, True, 64 * MIB))),
]
SILENT = [
    tier(),
    tier(counters=TierCounters(wait_seconds=0.9)),
    tier(counters=TierCounters(wait_seconds=100.0), prefill_tokens_per_second=None),
    tier(TierMeasurements(("8.8.8.8",), has_access_control=True)),
    tier(TierMeasurements((), has_access_control=False)),
    tier(TierMeasurements((), True, True, 100 * MIB)),
    tier(TierMeasurements((), True, True, None)),
    tier(TierMeasurements((), True, False, 0)),
    tier(**client(state="connecting", reason="not yet")),
]


@pytest.mark.parametrize(("check", "severity", "words", "given"), FIRING)
def test_a_finding_has_problem_reason_fix_and_evidence(
    check: str, severity: str, words: str, given: TierEvidence
) -> None:
    (finding,) = diagnose(evidence(tier=given)).findings
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.pool == ("a" if check in ("tier", "tier_time", "tier_objects") else None)
    assert words in finding.what
    assert finding.why
    assert finding.fix


def test_clients_that_pools_share_are_told_of_once() -> None:
    given = tier(**client(state="failed", reason="no", corrupt_objects=2))
    items = [replace(one, pool=pool, clients=given.view.items[1].clients) for one in given.view.items for pool in "ab"]
    told = diagnose(evidence(tier=given._replace(view=replace(given.view, items=items))))
    assert sorted(finding.check for finding in told.findings) == ["tier", "tier_objects"]


@pytest.mark.parametrize("given", SILENT)
def test_a_healthy_tier_has_no_findings(given: TierEvidence) -> None:
    told = diagnose(evidence(tier=given))
    assert told.findings == []
    assert set(TIER_CHECKS) <= set(told.checks)


def test_without_a_store_nothing_is_said_of_it() -> None:
    told = diagnose(evidence())
    assert not set(TIER_CHECKS) & {*told.checks, *told.skipped}


async def test_the_route_gathers_the_evidence(
    launch: Launch, engine: OffloadEngine, tiered_host: TieredHost, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))

    async def found() -> list[tuple[str, str]]:
        answer = (await client.get("/v1/doctor")).json()
        return [(one["check"], one["severity"]) for one in answer["findings"] if one["check"].startswith("tier")]

    assert await found() == []
    tiered_host.begin()
    assert await found() == []
    tiered_host.stats, tiered_host.health = ClientStats(corrupt_objects=1), ClientHealth("failed", "it is broken")
    tiered_host.measurements = OPEN._replace(pins_memory=True, memlock_bytes=1)
    assert sorted(await found()) == [
        ("tier", "error"), ("tier_access", "warning"), ("tier_memlock", "warning"), ("tier_objects", "error"),
    ]  # fmt: skip
