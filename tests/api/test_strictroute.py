"""Unknown parameters, unexpected bodies and numbers that are too large are refused before anything changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from tests.api.conftest import AGENT

from kvstow.control.engine import OffloadEngine
from kvstow_api.routes import ROUTERS
from kvstow_api.strictroute import MAX_ERRORS, StrictRoute, _parse

pytestmark = pytest.mark.anyio

EVICT = "/v1/pools/host/evict"
KEY = "000000000000"
TRIAL = {"dry_run": "true"}
CHANGES = [
    ("PUT", "/v1/drain", {}),
    ("PUT", "/v1/bypass", {"load": True}),
    ("POST", "/v1/pools/host/protect", {"keys": [KEY]}),
    ("POST", "/v1/pools/host/unprotect", {"all": True}),
    ("POST", "/v1/pools/host/retry", None),
    ("DELETE", f"/v1/pools/host/blocks/{KEY}", None),
    ("POST", "/v1/pools/host/evict", {"slots": 1}),
    ("POST", "/v1/pools/host/purge", {"all": True}),
    ("PATCH", "/v1/pools/host", {"policy": "lru"}),
]


def told(engine: OffloadEngine) -> Any:
    return (engine.stats(), engine.blocks(), engine.desired(), engine.admin.drain_status, engine.admin.bypass)


def test_every_route_of_v1_is_strict() -> None:
    routes = [route for router in ROUTERS for route in router.routes if route.include_in_schema]  # type: ignore[attr-defined]
    loose = [route.path for route in routes if not isinstance(route, StrictRoute)]  # type: ignore[attr-defined]
    assert not [path for path in loose if path.startswith("/v1")]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_dry_run_in_the_query_changes_nothing(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], method: str, path: str, body: Any
) -> None:
    ranks.store(keys[:3])
    ranks.engine.admin.protect(keys[1:2], None)
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


async def test_unknown_query_parameters_of_reads_are_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/pools?page=2&state=x")
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["page", "state"]


async def test_the_body_of_a_get_is_refused_without_reading_it(client: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    assert (await client.request("GET", "/v1/pools", content=never())).status_code == 400


@pytest.mark.parametrize(
    ("path", "content", "field", "allowed"),
    [
        (EVICT, b'{"slots": 9223372036854775808}', "slots", "a 64-bit integer"),
        (EVICT, b'{"slots": -9223372036854775809}', "slots", "a 64-bit integer"),
        (EVICT, b'{"slots": ' + b"9" * 10_000 + b"}", "slots", "a 64-bit integer"),
        (EVICT, b'{"idle_seconds": 1e999}', "idle_seconds", "a finite number"),
        ("/v1/pools/host/protect", b'{"keys": ["00", 1e999]}', "keys.1", "a finite number"),
        ("/v1/ranks/0/report", b'{"pin_failures": {"driver": 99999999999999999999}}', "pin_failures.driver", "64-bit"),
    ],
)
async def test_the_field_of_a_number_that_is_too_large_is_named(
    client: httpx.AsyncClient, path: str, content: bytes, field: str, allowed: str
) -> None:
    headers = {"Content-Type": "application/json"} | (AGENT if path.endswith("/report") else {})
    answer = await client.post(path, content=content, headers=headers)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, field)
    assert allowed in error["message"]
    assert field in answer.json()["detail"]


def test_errors_about_large_numbers_are_limited() -> None:
    with pytest.raises(RequestValidationError) as refused:
        _parse(b"[" + b",".join([b"1e999"] * 1000) + b"]")
    assert len(refused.value.errors()) == MAX_ERRORS
