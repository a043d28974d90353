from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from kvstow.errors import (
    ConfigError,
    ConflictError,
    CopyError,
    DataPlaneFailedError,
    InsufficientMemoryError,
    IntegrityError,
    InvalidRequestError,
    KvstowError,
    LeaseError,
    NotFoundError,
    QueueFullError,
)

pytestmark = pytest.mark.anyio

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "errors", "retry_after"}


def raising(error: Exception) -> Any:
    """Prepares an application with a route that raises `error`."""

    def prepare(app: FastAPI) -> None:
        @app.get("/raise")
        async def route() -> None:
            raise error

    return prepare


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("no"), 422),
        (ConfigError("policy", "mru", "auto or lru"), 422),
        (NotFoundError("no"), 404),
        (ConflictError("no"), 409),
        (LeaseError("no"), 409),
        (InsufficientMemoryError("no"), 507),
        (QueueFullError("no"), 503),
        (DataPlaneFailedError("no"), 503),
    ],
)
async def test_errors_of_the_engine_become_problems(launch: Any, error: KvstowError, status: int) -> None:
    answer = await (await launch(raising(error))).get("/raise", headers={"X-Request-Id": "abc"})
    body = answer.json()
    assert answer.status_code == body["status"] == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(body) == MEMBERS
    assert body["code"] == error.code
    assert body["type"] == f"urn:kvstow:problem:{error.code}"
    assert body["instance"] == "abc"
    assert body["detail"] == str(error)
    assert body["retry_after"] == (1 if status == 503 else None)


async def test_a_config_error_names_key_value_and_allowed_values(launch: Any) -> None:
    answer = await (await launch(raising(ConfigError("policy", "mru", "auto or lru")))).get("/raise")
    (error,) = answer.json()["errors"]
    assert (error["field"], error["value"], error["allowed"]) == ("policy", "mru", "auto or lru")


@pytest.mark.parametrize("error", [RuntimeError("secret"), CopyError("secret"), IntegrityError("secret")])
async def test_internal_errors_answer_500_without_details_and_are_logged(
    launch: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = await launch(raising(error))
    with caplog.at_level(logging.ERROR, "kvstow.api"):
        answer = await client.get("/raise", headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == answer.json()["instance"] == "find-me"
    assert "secret" not in answer.text
    assert "find-me" in caplog.text
    assert "secret" in caplog.text


async def test_an_error_during_a_response_is_logged_and_closes_the_connection(
    launch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(app: FastAPI) -> None:
        async def half() -> Any:
            yield b"half"
            raise RuntimeError("in the middle")

        @app.get("/half")
        async def route() -> StreamingResponse:
            return StreamingResponse(half())

    client = await launch(prepare)
    with caplog.at_level(logging.ERROR, "kvstow.api"), pytest.raises(RuntimeError, match="in the middle"):
        await client.get("/half")
    assert "in the middle" in caplog.text


async def test_unknown_paths_and_methods_are_problems(client: httpx.AsyncClient) -> None:
    absent = await client.get("/v1/nothing")
    assert (absent.status_code, absent.json()["detail"]) == (404, "/v1/nothing does not exist")
    wrong = await client.post("/v1/info")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET, HEAD"
    assert "allowed: GET, HEAD" in wrong.json()["detail"]
    assert (await client.post("/v1/drain")).headers["allow"] == "DELETE, GET, HEAD, PUT"
    assert (await client.get("/v1/pools/host/evict")).headers["allow"] == "POST"
    for path in ("/redoc", "/v1/info/"):
        assert (await client.get(path)).status_code == 404


async def test_an_invalid_field_is_named_with_its_value(client: httpx.AsyncClient) -> None:
    body = {"slots": "1", "dry_run": 1, "size": 2.5}
    answer = await client.post("/v1/pools/host/evict", json=body)
    errors = {error["field"]: error for error in answer.json()["errors"]}
    assert answer.status_code == 422
    assert set(errors) == {"slots", "dry_run", "size"}
    assert errors["slots"]["value"] == "1"
    assert "integer" in errors["slots"]["allowed"]
    assert (errors["size"]["value"], errors["size"]["allowed"]) == (2.5, "slots, bytes, idle_seconds, context, dry_run")
    assert "slots is '1'" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body", "field", "allowed"),
    [
        ("PATCH", "/v1/pools/host", {"size": 1}, "size", "capacity_slots, capacity_bytes, policy, pinning_paused"),
        ("PATCH", "/v1/pools/host", {"policy": 10**400}, "policy", "auto, lru"),
        ("GET", "/v1/operations?page=1", None, "page", "page_size, page_token, pool, kind, state"),
        ("POST", "/v1/pools/host/purge", {"keys": ["0000", "zz"]}, "keys.1", "hex"),
        ("POST", "/v1/pools/host/evict", {"context": "00"}, "context", "32 hex digits"),
        ("GET", "/v1/contexts/zz", None, "context", "32 hex digits"),
        ("GET", "/v1/pools/host/blocks/zz", None, "key", "hex"),
        ("GET", "/v1/operations?page_token=zz", None, "page_token", "next_page_token"),
        ("GET", "/readyz?exclude=nothing", None, "exclude", "engine, pool, pinned"),
    ],
)
async def test_allowed_values_are_listed(
    client: httpx.AsyncClient, method: str, path: str, body: Any, field: str, allowed: str
) -> None:
    answer = await client.request(method, path, json=body)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, field)
    assert allowed in error["allowed"]
    assert allowed in answer.json()["detail"]


async def test_repeated_values_are_short_and_valid_json(client: httpx.AsyncClient) -> None:
    content = json.dumps({"mode": "\ud800" + "x" * 10_000})
    headers = {"Content-Type": "application/json"}
    answer = await client.put("/v1/drain", content=content.encode(), headers=headers)
    assert answer.status_code == 422
    assert len(answer.json()["errors"][0]["value"]) < 250
