"""Contexts: what readers and admins see of them, and what operators do with them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.tieredhost import TieredHost
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine
from kvstow.hints import context_id
from kvstow.status import ContextPage, ContextStatus

pytestmark = pytest.mark.anyio

TRIP = context_id("trip")


def status(name: str = "trip", **changes: Any) -> ContextStatus:
    given: dict[str, Any] = {
        "context": context_id(name).hex(),
        "namespace": "host",
        "blocks": 4,
        "bytes": 4 * 4096,
        "tokens": 64,
        "requests": 3,
        "idle_seconds": 1.5,
        "resume_in_seconds": 8.5,
        "name": name,
    }
    return ContextStatus(**{**given, **changes})


@pytest.fixture
def known(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> list[ContextStatus]:
    """The contexts of the pool, those with the most blocks first."""
    known = [status("trip", blocks=9), status("walk")]

    def page(start_rank: int = 0, limit: int = 100) -> ContextPage:
        end = start_rank + limit
        return ContextPage(tuple(known[start_rank:end]), end if end < len(known) else None, len(known))

    monkeypatch.setattr(engine, "contexts", page)
    monkeypatch.setattr(engine, "context", lambda context: [one for one in known if one.context == context.hex()])
    return known


async def test_contexts_come_in_pages_with_ids_and_names_for_admins_alone(
    client: httpx.AsyncClient, launch: Any, known: list[ContextStatus]
) -> None:
    first = (await client.get("/v1/contexts", params={"page_size": 1})).json()
    assert [(one["context"], one["name"], one["blocks"]) for one in first["items"]] == [(TRIP.hex(), "trip", 9)]
    assert first["total"] == 2
    rest = (await client.get("/v1/contexts", params={"page_token": first["next_page_token"]})).json()
    assert [one["name"] for one in rest["items"]] == ["walk"]
    assert rest["next_page_token"] is None
    stranger = await launch(caller=None)
    shown = (await stranger.get("/v1/contexts")).json()["items"]
    assert [(one["context"], one["name"]) for one in shown] == [(None, None)] * 2, "salts can be guessed by ids"


async def test_others_than_admins_cannot_try_which_contexts_there_are(launch: Any, known: list[ContextStatus]) -> None:
    stranger = await launch(caller=None)
    answers = [await stranger.get(f"/v1/contexts/{context_id(name).hex()}") for name in ("trip", "nothing")]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(403, "forbidden")] * 2


async def test_one_context_is_shown_changed_and_released(
    client: httpx.AsyncClient, engine: OffloadEngine, known: list[ContextStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(type(engine.admin), "set_context", lambda self, *given: done.append(given))

    def release(self: object, context: bytes) -> int:
        done.append(context)
        return 9

    monkeypatch.setattr(type(engine.admin), "release_context", release)
    url = f"/v1/contexts/{TRIP.hex()}"
    assert (await client.get(url)).json()["items"][0]["requests"] == 3
    changed = await client.patch(url, json={"resume_in_seconds": 30})
    assert (changed.status_code, changed.json()["items"][0]["context"]) == (200, TRIP.hex())
    released = await client.delete(url)
    assert (released.status_code, released.json()) == (200, {"blocks": 9})
    assert done == [(TRIP, 30.0), TRIP]


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
async def test_an_unknown_context_is_not_found(client: httpx.AsyncClient, method: str) -> None:
    body = {"resume_in_seconds": 1} if method == "PATCH" else None
    answer = await client.request(method, f"/v1/contexts/{TRIP.hex()}", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (404, f"there is no context {TRIP.hex()}")


@pytest.mark.parametrize("verb", ["evict", "purge"])
async def test_blocks_are_removed_by_context(
    client: httpx.AsyncClient, engine: OffloadEngine, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    real = getattr(type(engine.admin), verb)

    def noted(self: Any, **given: Any) -> Any:
        chosen.append(given.pop("context"))
        return real(self, slots=1, dry_run=True)

    monkeypatch.setattr(type(engine.admin), verb, noted)
    answer = await client.post(f"/v1/pools/host/{verb}", json={"context": TRIP.hex()})
    assert (answer.status_code, chosen) == (200, [TRIP])


async def test_there_is_nothing_to_fetch_from_without_a_tier(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"/v1/contexts/{TRIP.hex()}/prefetch")
    assert answer.status_code == 409
    assert "there is no store to read from" in answer.json()["detail"]


async def test_a_context_is_fetched_where_a_namespace_knows_it(
    launch: Any, engine: OffloadEngine, clock: FakeClock
) -> None:
    host = TieredHost(engine, clock)
    client = await launch(directory=host.directory(32))
    url = f"/v1/contexts/{TRIP.hex()}/prefetch"
    assert (await client.post(url)).status_code == 409, "no namespace uses the store"
    host.begin()
    assert (await client.post(url)).status_code == 404
    host.tiers.contexts[TRIP] = 7
    answer = await client.post(url)
    assert (answer.status_code, answer.json()) == (202, {"blocks": 7})
    host.close()
