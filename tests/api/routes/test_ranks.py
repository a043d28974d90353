from __future__ import annotations

from dataclasses import asdict
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.conftest import AGENT, send_report
from tests.doubles.fakes import FakeClock

from kvstow.attach.calls import Desired
from kvstow.attach.wire import CONTENT_TYPE
from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio


async def test_readiness_follows_the_reports(client: httpx.AsyncClient, clock: FakeClock, ranks: Any) -> None:
    ranks.report(state="pinning", pinned_slots=4, pin_rate_bytes_per_second=1e9)
    clock.advance(1.5)
    body = (await client.get("/v1/readiness")).json()
    assert (body["state"], body["usable_slots"]) == ("pinning", 4)
    rank = body["ranks"][1]
    assert (rank["boot_id"], rank["state"], rank["error"]) == ("boot-1", "pinning", None)
    assert (rank["pinned_bytes"], rank["target_bytes"]) == (4 * 4096, 16 * 4096)
    assert rank["pin_rate_bytes_per_second"] == 1e9
    assert rank["last_report_age_seconds"] == 1.5


async def test_ranks_are_listed_and_shown(client: httpx.AsyncClient, ranks: Any) -> None:
    items = (await client.get("/v1/ranks")).json()["items"]
    assert items == (await client.get("/v1/readiness")).json()["ranks"]
    assert (await client.get("/v1/ranks/1")).json() == items[1]
    assert list(items[1])[:5] == ["rank", "boot_id", "host", "pid", "device"]  # a reader sees first which rank it is


@pytest.mark.parametrize(("rank", "status"), [("2", 404), ("-1", 422), ("x", 422), ("1.5", 422), ("9" * 30, 404)])
async def test_another_rank_is_a_problem(client: httpx.AsyncClient, ranks: Any, rank: str, status: int) -> None:
    assert (await client.get(f"/v1/ranks/{rank}")).status_code == status
    assert (await send_report(client, ranks.make_report(0), rank=rank)).status_code in (status, 422)


async def test_a_report_is_taken_and_answered(client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any) -> None:
    engine.admin.pause_pinning(True)
    report = ranks.make_report(1, boot_id="anew", state="pinning", pinned_slots=3)
    answer = await send_report(client, report, rank=1)
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    desired = Desired.unpack(answer.content).desired
    assert (desired, desired.paused) == (engine.desired(), True)
    assert engine.readiness().ranks[1].boot_id == "anew"
    assert engine.readiness().usable_slots == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "RankReport.rank is 0; allowed: 1"),
        ({"rank": "1"}, "report: Expected `int`, got `str` - at `$.rank`"),
        ({"slot_bytes": 64}, "slot_bytes 64"),
        ({"pinned_slots": -1}, "RankReport.pinned_slots"),
        ({"boot_id": ""}, "boot_id"),
        ({"mood": "good"}, "unknown fields"),
        ({"pin_failures": {"driver": 1 << 63}}, "pin_failures is"),  # it would be no number of a metric
    ],
)
async def test_a_bad_report_is_refused_and_changes_nothing(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, change: dict[str, Any], words: str
) -> None:
    before = engine.readiness()
    body = msgspec.msgpack.encode((1.5, {**asdict(ranks.make_report(1)), **change}))
    answer = await send_report(client, body, rank=1)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    assert engine.readiness() == before


@pytest.mark.parametrize("content", [b"", b"[]", b"\x90", b"\xc0", b"\x92\xcb", b"\xff\xfe"])
async def test_a_report_that_is_none_is_refused(client: httpx.AsyncClient, content: bytes) -> None:
    assert (await send_report(client, content)).status_code == 422


async def test_a_report_has_one_content_type(client: httpx.AsyncClient, ranks: Any) -> None:
    headers = {**AGENT, "Content-Type": "application/json"}
    answer = await send_report(client, ranks.make_report(0), headers=headers)
    assert (answer.status_code, CONTENT_TYPE in answer.json()["detail"]) == (415, True)
    packed = await client.post("/v1/pools/host/evict", content=b"\x80", headers={"Content-Type": CONTENT_TYPE})
    assert packed.status_code == 415


async def test_a_rank_that_starts_anew_loses_its_blocks(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys)
    assert (await send_report(client, ranks.make_report(0, boot_id="anew"))).status_code == 200
    assert engine.stats().pool.slots.cached == 0
    assert (await client.get("/v1/stats")).json()["faults"]["rank_restarts"] == 1
