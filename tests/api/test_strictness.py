"""What the description does not allow, and what contradicts itself, is refused before anything changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import jsonschema_rs
import pytest
from tests.api.test_contract import describe

from kvstow.control.engine import OffloadEngine
from kvstow_api.problems import MAX_ERRORS

pytestmark = pytest.mark.anyio

EVICT = "/v1/pools/host/evict"
KEY = "000000000000"
WITHOUT_BODY = [
    ("DELETE", f"/v1/contexts/{'00' * 16}"),
    ("POST", "/v1/pools/host/retry"),
    ("DELETE", f"/v1/pools/host/blocks/{KEY}"),
]


def told(engine: OffloadEngine) -> Any:
    return (engine.stats(), engine.blocks(), engine.desired(), engine.admin.drain_status, engine.admin.bypass)


# -- each field of a body and each parameter of a query ----------------------------------------------------------------

DESCRIPTION = json.loads(json.dumps(describe()))
PLACES = {"key": KEY, "pool": "host", "context": "00" * 16, "session_id": "absent", "operation_id": "none", "rank": "0"}
VALUES: tuple[Any, ...] = (
    *(None, True, 1, 1.5, -1, 0, 10**400, "", "x", "1", "true", "two\nlines"),
    *([], ["zz"], ["0"], [""], [1], ["aa"] * 4097, {}, {"a": 1}),
)
"""Values of each type that JSON has. Those that a field does not allow are sent in it."""
WORDS = ("x", "", "nan", "inf", "-1", "-0.1", "1.5", "0", "31", "1001", "9" * 30, "zz", "true")
"""The same for the parameters of a query, which are text."""


class Operation(NamedTuple):
    """The schema of its body of JSON, and of its parameters by name."""

    method: str
    path: str
    body: dict[str, Any]
    query: dict[str, Any]


def described() -> Iterator[Operation]:
    for path, item in DESCRIPTION["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {"schema": {}})
            name = content["schema"].get("$ref", "").rpartition("/")[2]
            query = {one["name"]: one["schema"] for one in operation.get("parameters", ()) if one["in"] == "query"}
            if path.startswith("/v1") and path != "/v1/ranks/{rank}/report":  # which takes no JSON
                body: dict[str, Any] = DESCRIPTION["components"]["schemas"][name] if name else {}
                yield Operation(method, path.format(**PLACES), body, query)


OPERATIONS = list(described())


def meant(schema: dict[str, Any], word: str) -> Any:
    """The value that a word in a query stands for."""
    if schema.get("type") in ("integer", "number"):
        try:
            return json.loads(word)
        except ValueError:
            return None
    return word in ("true", "1") or (None if word != "0" else False) if schema.get("type") == "boolean" else word


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
async def test_a_field_or_parameter_is_refused_by_its_name_if_the_description_does_not_allow_it(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], operation: Operation
) -> None:
    ranks.store(keys[:4])
    before, method, path = told(ranks.engine), operation.method, operation.path
    assert operation.body.get("additionalProperties", False) is False
    needed = {name: operation.body["examples"][0][name] for name in operation.body.get("required", ())}
    wrong: list[tuple[str, dict[str, Any]]] = [("unknown", {**needed, "unknown": 1})] if operation.body else []
    for name, schema in operation.body.get("properties", {}).items():
        refused = [one for one in VALUES if not jsonschema_rs.is_valid(schema, one)]
        assert len(refused) > 5
        wrong += [(name, {**needed, name: one}) for one in refused]
        wrong += [(name, {**needed, name: 1.0})] if "integer" in str(schema) else []  # JSON Schema takes it for a 1
        wrong += [(name, {one: given for one, given in needed.items() if one != name})] if name in needed else []
    for name, body in wrong:
        headers = {"Content-Type": "application/json"}
        answer = await client.request(method, path, content=json.dumps(body).encode(), headers=headers)
        fields = {error["field"].partition(".")[0] for error in answer.json()["errors"]}
        assert (answer.status_code, fields) == (422, {name}), body
    unknown = await client.request(method, path, params={"unknown": "1"})
    assert (unknown.status_code, [error["field"] for error in unknown.json()["errors"]]) == (422, ["unknown"])
    for name, schema in operation.query.items():
        for word in WORDS:
            if not jsonschema_rs.is_valid(schema, meant(schema, word)):
                answer = await client.request(method, path, params={name: word})
                assert answer.status_code == 422, (name, word)
                assert name in {error["field"] for error in answer.json()["errors"]}, (name, word)
    assert told(ranks.engine) == before


# -- what no description says ------------------------------------------------------------------------------------------

SLOT_BYTES, MOST_SLOTS = 4096, 32
EVICTIONS: list[Any] = [{}, {"dry_run": True}, {"slots": 1, "bytes": 1}, {"slots": None}, [], None]
CONTRADICTIONS: list[tuple[str, str, Any]] = [
    *[("POST", EVICT, body) for body in EVICTIONS],
    *[("POST", "/v1/pools/host/purge", body) for body in ({}, {"all": True, "slots": 1}, {"all": False})],
    ("POST", "/v1/pools/host/purge", {"keys": ["aa"], "key_prefixes": ["aa"]}),
    *[("PATCH", "/v1/pools/host", body) for body in ({}, {"dry_run": True}, {"capacity_slots": MOST_SLOTS + 1})],
    ("PATCH", "/v1/pools/host", {"capacity_slots": 8, "capacity_bytes": SLOT_BYTES}),
    ("PATCH", "/v1/pools/host", {"capacity_bytes": SLOT_BYTES - 1}),
    ("PATCH", "/v1/pools/host", {"policy": "lru", "capacity_bytes": (MOST_SLOTS + 1) * SLOT_BYTES}),
    *[("PUT", "/v1/bypass", body) for body in ({}, {"ttl_seconds": 1}, None)],
    *[("PUT", "/v1/loglevel", {"level": "info", "logger": name}) for name in ("root", "uvicorn", "kvstow.nothing", "")],
]


@pytest.mark.parametrize(("method", "path", "body"), CONTRADICTIONS)
async def test_what_contradicts_itself_or_the_host_changes_nothing(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes], method: str, path: str, body: Any
) -> None:
    ranks.store(keys[:4])
    before = (told(ranks.engine), (await client.get("/v1/loglevel")).json())
    answer = await client.request(method, path, json=body)
    assert (answer.status_code, bool(answer.json()["errors"])) == (422, True)
    assert (told(ranks.engine), (await client.get("/v1/loglevel")).json()) == before
    assert (await client.get("/v1/operations")).json()["items"] == []


@pytest.mark.parametrize(("method", "path"), WITHOUT_BODY)
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
