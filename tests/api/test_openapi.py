from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

import kvstow.status
from kvstow import messages, stats
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.tier import tierstatus
from kvstow_api import answers, bodies, figures
from kvstow_api.answers import EVENT_TYPES
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_api.openapi import EXAMPLES

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    app = create_app(ApiHost(directory=EmbeddedDirectory(engine, 16), version="1.2.3", mode="test"))
    described: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    return described


async def test_the_document_is_served(client: httpx.AsyncClient, schema: dict[str, Any]) -> None:
    answer = await client.get("/openapi.json")
    assert (answer.status_code, answer.json()) == (200, schema)


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_every_problem_is_described_by_reference(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        for status, response in operation["responses"].items():
            if int(status) >= 400 and status != "503":
                assert response == {"$ref": f"#/components/responses/Problem{status}"}, (method, path)
    described = schema["components"]["responses"]["Problem422"]["content"]
    assert list(described) == ["application/problem+json"]


async def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    for reference in set(references(schema)):
        found: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found
    assert "HTTPValidationError" not in schema["components"]["schemas"]


async def test_all_but_probes_and_metrics_name_the_token(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        assert ("security" in operation) == path.startswith("/v1"), (method, path)
        if method != "get":
            assert {"401", "403", "500", "503"} <= set(operation["responses"]), (method, path)


async def test_operation_ids_are_unique_and_all_have_words(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(schema)]
    assert len(set(ids)) == len(ids)
    assert {"evict", "get_block", "change_pool"} <= set(ids)
    assert all(operation.get("description") for _, _, operation in operations(schema))


async def test_accepted_answers_are_operations(schema: dict[str, Any]) -> None:
    evict = schema["paths"]["/v1/pools/{pool}/evict"]["post"]["responses"]
    assert evict["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/OperationView")
    assert evict["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/RemovedView")


async def test_the_document_is_made_once_and_not_on_the_event_loop(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on: list[threading.Thread] = []

    def noted(app: FastAPI) -> dict[str, Any]:
        made_on.append(threading.current_thread())
        return describe(app)

    describe = FastAPI.openapi
    monkeypatch.setattr(FastAPI, "openapi", noted)
    client: httpx.AsyncClient = await launch()
    first, second = [await client.get("/openapi.json") for _ in range(2)]
    assert first.content == second.content
    assert first.headers["content-type"] == "application/json"
    assert len(made_on) == 1
    assert made_on[0] is not threading.current_thread()


TYPES = {
    name: kind
    for module in (bodies, figures, messages, stats, kvstow.status, tierstatus, answers)
    for name, kind in inspect.getmembers(module, inspect.isclass)
    if kind.__module__ == module.__name__
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid(name: str) -> None:
    kind, example = TYPES[name], EXAMPLES[name]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    made = adapter.validate_python(example)
    if is_dataclass(kind):
        assert adapter.dump_python(made, mode="json") | example == adapter.dump_python(made, mode="json")
        assert msgspec.convert(example, kind) == made


async def test_every_example_is_in_the_description(schema: dict[str, Any]) -> None:
    shown = {name: part["examples"] for name, part in schema["components"]["schemas"].items() if "examples" in part}
    assert shown == {name: [example] for name, example in EXAMPLES.items()}


async def test_every_answer_has_an_example(schema: dict[str, Any]) -> None:
    """Of its own, or of what it consists of."""
    described = schema["components"]["schemas"]

    def has_example(reference: str, seen: frozenset[str] = frozenset()) -> bool:
        name = reference.rpartition("/")[2]
        inner = {part for part in references(described[name]) if part not in seen}
        return "examples" in described[name] or any(has_example(part, seen | {reference}) for part in inner)

    for method, path, operation in operations(schema):
        for status, response in operation["responses"].items():
            for media in response.get("content", {}).values():
                found = ["example" in media, *map(has_example, references(media))]
                assert found[0] or (len(found) > 1 and all(found[1:])), (method, path, status)


async def test_every_type_of_event_is_described(schema: dict[str, Any]) -> None:
    words = schema["paths"]["/v1/events"]["get"]["description"]
    assert all(f"`{kind}`" in words for kind in EVENT_TYPES)


async def test_every_body_has_an_example(schema: dict[str, Any]) -> None:
    def has_example(part: Any) -> bool:
        if isinstance(part, dict) and "$ref" in part:
            return has_example(schema["components"]["schemas"][part["$ref"].rpartition("/")[2]])
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return (isinstance(part, dict) and "examples" in part) or any(map(has_example, parts))

    for method, path, operation in operations(schema):
        for media in operation.get("requestBody", {}).get("content", {}).values():
            assert has_example(media["schema"]), (method, path)


async def test_every_parameter_is_described(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (method, path, parameter["name"])


async def test_settings_come_with_their_etag(schema: dict[str, Any]) -> None:
    for path, method in (("/v1/pools/{pool}", "get"), ("/v1/pools/{pool}", "patch")):
        assert "ETag" in schema["paths"][path][method]["responses"]["200"]["headers"]


async def test_a_head_that_is_too_large_is_described_everywhere(schema: dict[str, Any]) -> None:
    for item in schema["paths"].values():
        for operation in item.values():
            assert "431" in operation["responses"]


async def test_the_stream_of_events_is_typed(schema: dict[str, Any]) -> None:
    content = schema["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]
    stream = content["text/event-stream"]["schema"]
    assert stream["contentSchema"]["items"] == {"$ref": "#/components/schemas/EventView"}
    assert set(schema["components"]["schemas"]["EventView"]["properties"]) == {"id", "type", "data"}
