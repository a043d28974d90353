from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.conftest import pages
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.directory import EmbeddedDirectory

pytestmark = pytest.mark.anyio

BLOCKS = "/v1/pools/host/blocks"


async def test_pages_list_every_block_once(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:10])
    found = await pages(client, BLOCKS, page_size=4)
    assert sorted(item["key"] for page in found for item in page) == sorted(key.hex() for key in keys[:10])
    assert max(map(len, found)) <= 4
    assert len(found) in (3, 4)


async def test_a_page_reaches_over_empty_stretches(launch: Any, ranks: Any, keys: list[bytes]) -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=5000, num_ranks=2))
    wide = type(ranks)(engine)
    wide.report()
    many = [number.to_bytes(4, "big") for number in range(5000)]
    wide.store(many)
    engine.admin.purge(keys=many[:4990]).run()
    client = await launch(directory=EmbeddedDirectory(engine, 5000))
    body = (await client.get(BLOCKS)).json()
    assert len(body["items"]) == 10


async def test_a_block_is_shown_with_its_state(
    client: httpx.AsyncClient, engine: OffloadEngine, clock: FakeClock, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:3])
    clock.advance(2.0)
    ranks.lease(keys[:1])
    leased, cached = [(await client.get(f"{BLOCKS}/{key.hex().upper()}")).json() for key in keys[:2]]
    assert (leased["state"], leased["leases"], leased["idle_seconds"]) == ("leased", 1, 0.0)
    slot = cached.pop("slot")
    assert 0 <= slot < 16
    assert cached == {
        "key": keys[1].hex(),
        "namespace": "host",
        "state": "cached",
        "age_seconds": 2.0,
        "idle_seconds": 2.0,
        "leases": 0,
    }


@pytest.mark.parametrize(("key", "status"), [("0000ffff", 404), ("xyz", 422), ("abc", 422), ("%20", 422)])
async def test_a_block_that_is_not_there_is_a_problem(client: httpx.AsyncClient, key: str, status: int) -> None:
    assert (await client.get(f"{BLOCKS}/{key}")).status_code == status


async def test_blocks_of_one_state_are_listed(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:10])
    ranks.lease(keys[1:8:3])
    wanted = {"leased": keys[1:8:3], "cached": [key for key in keys[:10] if key not in keys[1:8:3]]}
    for state, chosen in wanted.items():
        found = await pages(client, BLOCKS, state=state, page_size=2)
        assert [item["key"] for page in found for item in page] == [key.hex() for key in chosen]
        assert max(map(len, found)) <= 2


async def test_a_state_that_is_rare_costs_a_bounded_look(launch: Any, ranks: Any) -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=9000, num_ranks=2))
    wide = type(ranks)(engine)
    wide.report()
    many = [number.to_bytes(4, "big") for number in range(9000)]
    wide.store(many)
    wide.lease(many[-1:])
    client = await launch(directory=EmbeddedDirectory(engine, 9000))
    assert [len(page) for page in await pages(client, BLOCKS, state="leased")] == [0, 0, 1]


async def test_a_token_beyond_the_pool_is_the_end(client: httpx.AsyncClient, ranks: Any) -> None:
    body = (await client.get(BLOCKS, params={"page_token": "p" + "9" * 15})).json()
    assert body == {"items": [], "next_page_token": None}


async def test_one_block_is_removed(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:2])
    answer = await client.delete(f"{BLOCKS}/{keys[0].hex()}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert ranks.engine.contains(keys[:2]) == [False, True]
    assert (await client.delete(f"{BLOCKS}/{keys[0].hex()}")).status_code == 404
    ranks.engine.check_integrity()


@pytest.mark.parametrize("hold", ["lease", "load"])
async def test_a_block_in_use_stays(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes], hold: str
) -> None:
    ranks.store(keys[:1])
    lease = ranks.lease(keys[:1])
    if hold == "load":
        engine.begin_load(lease, [3])
    answer = await client.delete(f"{BLOCKS}/{keys[0].hex()}")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "leased" in answer.json()["detail"]
    assert engine.contains(keys[:1]) == [True]


async def test_a_lookup_tells_what_is_there_and_changes_nothing(
    client: httpx.AsyncClient, engine: OffloadEngine, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store([*keys[:2], keys[3]])
    before = engine.stats()
    body = {"keys": [key.hex() for key in keys[:5]]}
    answer = await client.post("/v1/lookup", json=body)
    assert answer.json() == {"leading": 2, "present": [True, True, False, True, False], "refusal": None}
    assert engine.stats() == before
    engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    assert (await client.post("/v1/lookup", json=body)).json() == {**answer.json(), "refusal": "bypassed"}
