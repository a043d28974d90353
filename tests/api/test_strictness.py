"""Unknown parameters, unexpected bodies and numbers that are too large are refused before anything changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvstow.control.engine import OffloadEngine
from kvstow_api.problems import MAX_ERRORS
from kvstow_api.queries import _refuse_undefined
from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio

EVICT = "/v1/pools/host/evict"
KEY = "000000000000"
TRIAL = {"dry_run": "true"}
CHANGES = [
    ("PUT", "/v1/drain", {}),
    ("PUT", "/v1/bypass", {"load": True}),
    ("PATCH", f"/v1/contexts/{'00' * 16}", {"resume_in_seconds": 5}),
    ("DELETE", f"/v1/contexts/{'00' * 16}", None),
    ("POST", "/v1/pools/host/retry", None),
    ("DELETE", f"/v1/pools/host/blocks/{KEY}", None),
    ("POST", "/v1/pools/host/evict", {"slots": 1}),
    ("POST", "/v1/pools/host/purge", {"all": True}),
    ("PATCH", "/v1/pools/host", {"policy": "lru"}),
]


def told(engine: OffloadEngine) -> Any:
    return (engine.stats(), engine.blocks(), engine.desired(), engine.admin.drain_status, engine.admin.bypass)


def test_every_route_of_v1_is_strict() -> None:
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    strict = [one.path for one in routes if _refuse_undefined in [each.call for each in one.dependant.dependencies]]
    assert {one.path for one in routes if one.path.startswith("/v1")} == set(strict) - {"/"}


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_dry_run_in_the_query_changes_nothing(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], method: str, path: str, body: Any
) -> None:
    ranks.store(keys[:3])
    before = told(ranks.engine)
    answer = await client.request(method, path, json=body, params=TRIAL)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "dry_run")
    assert told(ranks.engine) == before


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, body in CHANGES if body is None])
async def test_an_unexpected_body_is_refused(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], method: str, path: str
) -> None:
    ranks.store(keys[:1])
    before = told(ranks.engine)
    answer = await client.request(method, path, json={"dry_run": True})
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"], error["message"]) == (422, "body", "No body is allowed here")
    assert told(ranks.engine) == before


@pytest.mark.parametrize("again", ["true", "false"])
async def test_a_repeated_query_parameter_is_refused(client: httpx.AsyncClient, again: str) -> None:
    answer = await client.delete(f"/v1/sessions/absent?kill=true&kill={again}")
    assert answer.status_code == 422
    assert [(one["field"], one["message"]) for one in answer.json()["errors"]] == [("kill", "Allowed only once")] * 2
    assert (await client.delete("/v1/sessions/absent?kill=true")).status_code == 404
    reading = await client.get("/v1/transfers?pool=host&slowest=5&slowest=6")
    assert {one["field"] for one in reading.json()["errors"]} == {"slowest"}


async def test_a_policy_that_is_a_number_beyond_every_float_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.patch("/v1/pools/host", json={"policy": 10**400})
    (error,) = answer.json()["errors"]
    allowed = "auto, lru"
    assert (answer.status_code, error["field"], error["allowed"]) == (422, "policy", allowed)
    assert error["message"] == f"this is not a policy; allowed: {allowed}"


async def test_unknown_query_parameters_of_reads_are_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/pools?page=2&state=x")
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["page", "state"]


async def test_the_body_of_a_get_is_refused_without_reading_it(client: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    for headers, status in (({}, 411), ({"Content-Length": "1"}, 400)):
        answer = await client.request("GET", "/v1/pools", content=never(), headers=headers)
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("path", "content", "field", "allowed"),
    [
        (EVICT, b'{"slots": 9223372036854775808}', "slots", "less than 9223372036854775808"),
        (EVICT, b'{"slots": -9223372036854775809}', "slots", "greater than or equal to 1"),
        (EVICT, b'{"idle_seconds": 1e999}', "idle_seconds", "a finite number"),
        (EVICT, b'{"idle_seconds": NaN}', "idle_seconds", "a finite number"),
        (EVICT, b'{"slots": Infinity}', "slots", "a valid integer"),
        ("/v1/pools/host/purge", b'{"keys": ["00", 1e999]}', "keys.1", "this is not a key"),
    ],
)
async def test_the_field_of_a_number_that_is_too_large_is_named(
    client: httpx.AsyncClient, path: str, content: bytes, field: str, allowed: str
) -> None:
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, field)
    assert allowed in error["message"]
    assert field in answer.json()["detail"]


async def test_errors_in_one_answer_are_limited(client: httpx.AsyncClient) -> None:
    body = {f"unknown_{number}": 1 for number in range(1000)}
    assert len((await client.post(EVICT, json=body)).json()["errors"]) == MAX_ERRORS
