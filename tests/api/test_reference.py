"""The page of the OpenAPI description."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from tests.api.test_page import Document

from kvstow_api.page.reference import reference

pytestmark = pytest.mark.anyio


async def test_every_route_and_type_is_on_the_page(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    answer = await client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    document = Document(answer.text)
    assert document.open == []
    ids = set(document.attributes("id"))
    assert {one["operationId"] for item in described["paths"].values() for one in item.values()} <= ids
    assert {f"type-{name}" for name in described["components"]["schemas"]} <= ids
    assert set(described["paths"]) <= set(document.texts)


async def test_every_link_of_the_page_leads_somewhere(client: httpx.AsyncClient) -> None:
    document = Document((await client.get("/docs")).text)
    ids = set(document.attributes("id"))
    for href in filter(None, document.attributes("href")):
        if href.startswith("#"):
            assert href[1:] in ids
        elif not href.startswith("data:"):
            assert (await client.get(f"/{href.removeprefix('./')}")).status_code == 200


async def test_the_policy_allows_the_pages_style_and_no_script(client: httpx.AsyncClient) -> None:
    answer = await client.get("/docs")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    (style,) = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
    assert policy.pop("style-src") == f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'none'"}
    document = Document(answer.text)
    assert document.attributes("style") == document.attributes("src") == []
    assert "script" not in {tag for tag, _ in document.tags}


def described(**operation: Any) -> dict[str, Any]:
    operation = {"tags": ["things"], "operationId": "get_thing", "responses": {}, **operation}
    return {
        "info": {"title": "A title", "description": "What it is.", "version": "1"},
        "paths": {"/v1/thing": {"get": operation}},
        "components": {"schemas": {}},
    }


def test_values_are_escaped() -> None:
    hostile = '<script>alert(1)</script>"&'
    schema = {"type": "string", "default": hostile, "pattern": hostile}
    parameter = {"name": hostile, "in": "query", "schema": schema, "description": f"{hostile} `{hostile}`"}
    page = reference(described(description=hostile, operationId=hostile, parameters=[parameter])).html.decode()
    assert "<script" not in page
    assert Document(page).open == []


def test_limits_of_a_parameter_are_said_in_words() -> None:
    schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}], "default": 5}
    parameter = {"name": "most", "in": "query", "schema": schema, "required": True, "description": "How many"}
    page = reference(described(parameters=[parameter])).html.decode()
    assert "<td>integer or null</td><td>How many; required; default 5; at least 1; at most 9</td>" in page
