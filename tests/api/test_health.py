from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.api.conftest import Launch
from tests.api.tieredhost import PART, URL, TieredHost
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine

pytestmark = pytest.mark.anyio

PROBES = ("/livez", "/readyz", "/startupz", "/health", "/healthz")


@pytest.mark.parametrize("probe", PROBES)
async def test_probes_answer_ok_in_plain_text(client: httpx.AsyncClient, ranks: Any, probe: str) -> None:
    answer = await client.get(probe)
    assert (answer.status_code, answer.text) == (200, "ok")
    assert answer.headers["content-type"].startswith("text/plain")


async def test_verbose_names_every_check_and_marks_informational_ones(client: httpx.AsyncClient, ranks: Any) -> None:
    lines = (await client.get("/readyz?verbose")).text.splitlines()
    assert lines == [
        "[+]engine ok",
        "[+]pool ok (informational)",
        "[+]pinned ok (informational)",
        "[+]ranks ok",
        "[+]transfers ok",
        "[+]loop ok",
        "readyz check passed",
    ]


@pytest.mark.parametrize("value", ["false", "0"])
async def test_verbose_can_be_off(client: httpx.AsyncClient, ranks: Any, value: str) -> None:
    assert (await client.get(f"/readyz?verbose={value}")).text == "ok"


async def test_health_and_healthz_are_readyz(client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any) -> None:
    engine.admin.drain("all", None)
    answers = [await client.get(path) for path in ("/readyz", "/health", "/healthz")]
    assert {(answer.status_code, answer.text) for answer in answers} == {(503, answers[0].text)}


async def test_readyz_passes_while_pinning_and_shows_progress(client: httpx.AsyncClient, ranks: Any) -> None:
    ranks.report(state="pinning", pinned_slots=4)
    answer = await client.get("/readyz?verbose")
    assert answer.status_code == 200
    assert "[-]pinned failed: the pool is still growing: 4 of 16 slots (informational)" in answer.text


@pytest.mark.parametrize("name", ["pool", "pinned"])
async def test_informational_checks_fail_readyz_when_required(launch: Any, ranks: Any, name: str) -> None:
    ranks.report(state="pinning", pinned_slots=0)
    assert (await (await launch()).get("/readyz")).status_code == 200
    answer = await (await launch(readiness_require=(name,))).get("/readyz")
    assert answer.status_code == 503
    assert f"[-]{name} failed" in answer.text


async def test_an_informational_check_requested_alone_counts(client: httpx.AsyncClient, ranks: Any) -> None:
    assert (await client.get("/readyz/pinned")).status_code == 200
    ranks.report(state="pinning", pinned_slots=1)
    answer = await client.get("/readyz/pinned")
    assert answer.status_code == 503
    assert answer.text.startswith("[-]pinned failed")


async def test_draining_and_stopping_fail_readyz_but_not_livez(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any
) -> None:
    engine.admin.drain("stop_stores", None)
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]engine failed: the engine drains (mode stop_stores)" in answer.text
    engine.admin.undrain()
    assert (await client.get("/readyz")).status_code == 200
    engine.close()
    assert "the engine is stopped" in (await client.get("/readyz")).text
    assert (await client.get("/livez")).status_code == 200


async def test_ranks_may_be_silent_during_the_grace_only(client: httpx.AsyncClient, clock: FakeClock) -> None:
    assert (await client.get("/readyz")).status_code == 200
    clock.advance(10.0)
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]ranks failed: rank 0 has never reported; rank 1 has never reported" in answer.text


async def test_a_rank_that_stops_reporting_fails_in_the_grace_too(launch: Any, clock: FakeClock, ranks: Any) -> None:
    client = await launch(startup_grace=1000.0)
    clock.advance(5.5)
    ranks.engine.report(ranks.make_report(0))
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]ranks failed: rank 1 (pid 1001 on node) has been silent for 5.5 s" in answer.text
    assert "rank 0" not in answer.text
    ranks.report()
    assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("state", ["degraded", "failed", "stopped"])
async def test_a_failing_rank_fails_readyz_with_its_reason(client: httpx.AsyncClient, ranks: Any, state: str) -> None:
    ranks.engine.report(ranks.make_report(1, state=state, error_reason="copy_thread", error="limit is 8 MiB"))
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert f"[-]ranks failed: rank 1 is {state} (copy_thread: limit is 8 MiB)" in answer.text
    assert "[+]engine ok" in answer.text
    assert (await client.get("/livez")).status_code == 200


async def test_a_stuck_transfer_fails_readyz(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    op = ranks.begin_store(keys[:1])
    clock.advance(31.0)
    ranks.report()
    engine.tick()
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]transfers failed: the engine is stuck: its oldest transfer is 31 s old" in answer.text
    ranks.finish(op)
    assert (await client.get("/readyz")).status_code == 200


async def test_excluded_checks_do_not_count(client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any) -> None:
    engine.admin.drain("all", None)
    answer = await client.get("/readyz?verbose&exclude=engine, loop")
    assert answer.status_code == 200
    assert "[+]engine excluded: ok" in answer.text


async def test_unknown_checks_are_refused_with_a_list_of_the_known_ones(client: httpx.AsyncClient) -> None:
    excluded = await client.get("/readyz?exclude=engin")
    assert excluded.status_code == 422
    assert excluded.json()["errors"][0]["allowed"] == "engine, pool, pinned, ranks, transfers, loop"
    single = await client.get("/readyz/engin")
    assert single.status_code == 404
    assert "engine, pool, pinned, ranks, transfers, loop" in single.json()["detail"]


async def test_checks_of_the_host_belong_to_their_probe(launch: Any, ranks: Any) -> None:
    reason: dict[str, str | None] = {"copy": None, "ticker": None, "boot": None}
    client = await launch(
        live_checks={"copy": lambda: reason["copy"]},
        ready_checks={"ticker": lambda: reason["ticker"]},
        startup_checks={"boot": lambda: reason["boot"]},
    )
    for name, probe in (("copy", "/livez"), ("ticker", "/readyz"), ("boot", "/startupz")):
        reason[name] = "the thread has ended"
        failed = {path for path in ("/livez", "/readyz", "/startupz") if (await client.get(path)).status_code == 503}
        assert failed == {probe}
        assert f"[-]{name} failed: the thread has ended" in (await client.get(f"{probe}/{name}")).text
        reason[name] = None


async def test_a_check_that_raises_has_failed(launch: Any, ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await launch(ready_checks={"odd": lambda: str(1 // 0)})
    with caplog.at_level(logging.ERROR, "kvstow.api"):
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "[-]odd failed: the check has raised ZeroDivisionError; the log has the traceback" in answer.text
    assert "ZeroDivisionError: integer" in caplog.text


async def test_a_tier_that_is_down_is_named_and_fails_no_probe(
    launch: Launch, engine: OffloadEngine, tiered_host: TieredHost, ranks: Any
) -> None:
    client = await launch(directory=tiered_host.directory(16))

    async def probe() -> tuple[int, str]:
        answer = await client.get("/readyz?verbose")
        (line,) = [line for line in answer.text.splitlines() if "tier" in line]
        return answer.status_code, line

    assert await probe() == (200, "[+]tier ok (informational)")
    tiered_host.begin(state="down", reason="no answer in 0.5 s")
    assert await probe() == (
        200,
        f"[-]tier failed: the store {URL} is not used for a1 of pool host: no answer in 0.5 s (informational)",
    )
    assert (await client.get("/readyz/tier")).status_code == 503
    tiered_host.tiers.part = replace(PART, state="failed", reason="it cannot register memory")
    assert f"transfers of the node of the store {URL} have failed: it cannot register memory" in (await probe())[1]
    tiered_host.close()


async def test_a_host_without_a_tier_has_no_check_of_it(client: httpx.AsyncClient) -> None:
    assert "tier" not in (await client.get("/readyz?verbose")).text
