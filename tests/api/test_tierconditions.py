"""The conditions of the store below the pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.conftest import CAPACITY, Launch
from tests.api.test_conditions import HOST, diagnose, evidence
from tests.api.tieredhost import PART, STATUS, TieredHost

from kvstow.control.engine import OffloadEngine
from kvstow.tier.blockstore import PartCounters, PartState, StorePart
from kvstow.tier.tierstatus import TierCounters
from kvstow_api.answers import TierView
from kvstow_api.conditions.evidence import TABLE, Evidence
from kvstow_api.directory import TierMeasurements
from kvstow_api.hostwatch import Measured

pytestmark = pytest.mark.anyio

MIB = 1 << 20
POOL = replace(
    STATUS, pool="a", prefill_tokens_per_second=10_000.0, counters=TierCounters(wait_seconds=5.0, saved_seconds=50.0)
)
OF_TIER = {one.name for one in TABLE if one.of == "tier"}
OPEN = TierMeasurements(("8.8.8.8",))


def tier(
    measured: TierMeasurements = TierMeasurements(),  # noqa: B008 - frozen
    part: StorePart = PART,
    corrupt: int = 0,
    **changes: Any,
) -> Evidence:
    view = TierView(
        store="mooncake",
        url="mooncake://m:1",
        items=[POOL, replace(POOL, namespace="a2", **changes)],
        parts=[part],
    )
    measurements = Measured(HOST, tier=measured)
    return evidence(tier=view, corrupt={part.name: corrupt}, measured=measurements, granted_bytes=100 * MIB)


def part(state: PartState = "on", reason: str = "", **counted: int) -> dict[str, Any]:
    return {"part": replace(PART, state=state, reason=reason, counters=PartCounters(**counted))}


FIRING = [
    ("tier_down", "warning", "no answer in 0.5 s", tier(state="down", reason="no answer in 0.5 s")),
    ("tier_off", "warning", "a2 of pool a does not use", tier(state="off", reason="the weights were changed")),
    ("tier_client", "error", "cannot be registered", tier(**part("failed", "cannot be registered"))),
    (
        "tier_time",
        "warning",
        "waited 51 s for the store, and saved 50 s",
        tier(counters=TierCounters(wait_seconds=51.0, saved_seconds=50.0)),
    ),
    ("tier_objects", "error", "2 blocks", tier(corrupt=2)),
    ("tier_access", "warning", "8.8.8.8", tier(OPEN)),
    ("tier_memlock", "warning", "RLIMIT_MEMLOCK is 64 MiB", tier(TierMeasurements((), True, 64 * MIB))),
]
SILENT = [
    tier(),
    tier(counters=TierCounters(wait_seconds=0.9)),
    tier(counters=TierCounters(wait_seconds=100.0), prefill_tokens_per_second=None),
    tier(TierMeasurements(())),
    tier(TierMeasurements((), True, 100 * MIB)),
    tier(TierMeasurements((), True, None)),
    tier(TierMeasurements((), False, 0)),
    tier(**part("starting", "not yet")),
]


@pytest.mark.parametrize(("name", "severity", "words", "given"), FIRING)
def test_a_condition_has_cause_reason_and_fix(name: str, severity: str, words: str, given: Evidence) -> None:
    (one,) = diagnose(given).conditions
    assert (one.name, one.severity) == (name, severity)
    assert one.pool == ("a" if name in ("tier_down", "tier_off", "tier_time") else None)
    assert words in one.what
    assert one.why
    assert one.fix


@pytest.mark.parametrize("given", SILENT)
def test_a_healthy_tier_has_no_conditions(given: Evidence) -> None:
    told = diagnose(given)
    assert told.conditions == []
    assert set(told.checked) >= OF_TIER


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_store_that_does_not_answer_is_told_before_an_engine_uses_it(restarts: int) -> None:
    given = tier(**part("starting", "it cannot connect to its master", restarts=restarts))
    found = diagnose(given._replace(tier=replace(given.tier, items=[], parts=2 * given.tier.parts))).conditions
    told = [one.what for one in found if one.name == "tier_down"]
    sentence = "the store mooncake://m:1 does not answer: it cannot connect to its master"
    assert told == [sentence] * restarts, "the first attempt is no news"


def test_without_a_store_nothing_is_said_of_it() -> None:
    told = diagnose(evidence())
    assert not OF_TIER & {*told.checked, *told.skipped}


async def test_the_route_gathers_the_evidence(
    launch: Launch, engine: OffloadEngine, tiered_host: TieredHost, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await launch(directory=tiered_host.directory(2 * CAPACITY))

    async def found() -> list[tuple[str, str]]:
        answer = (await client.get("/v1/doctor")).json()
        return [(one["name"], one["severity"]) for one in answer["conditions"] if one["name"] in OF_TIER]

    assert await found() == []
    tiered_host.begin()
    assert await found() == []
    tiered_host.tiers.part = part("failed", "it is broken", corrupt_blocks=1)["part"]
    tiered_host.tiers.measurements = OPEN._replace(pins_memory=True, memlock_bytes=1)
    assert sorted(await found()) == [
        ("tier_access", "warning"), ("tier_client", "error"), ("tier_memlock", "warning"), ("tier_objects", "error"),
    ]  # fmt: skip
