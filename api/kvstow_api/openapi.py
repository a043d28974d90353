"""The OpenAPI description. Problems are described once, and every route names those that it may answer."""

from __future__ import annotations

import json
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from kvstow_api.answers import EventView, ProblemView
from kvstow_api.page.reference import Reference, reference
from kvstow_api.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "examples.json").read_text())
"""An example of each body and answer, by the name of its type."""

_ANY = (431, 500)  # answered before a request has a route, too
_STRICT = (401, 403, 422, 503, *_ANY)  # 422 also stands for a query or a body that the route does not define
_ANY_BODY = (408, 413, 415)  # answered to any body, even if the route defines none

ETAG: Responses = {
    200: {"headers": {"ETag": {"description": "Names the current settings", "schema": {"type": "string"}}}}
}


def reading(*codes: int, guarded: bool = True) -> Responses:
    """Return the problems of a GET: `codes`, and those of all routes. A `guarded` route may need a token."""
    return _described(*codes, *(_STRICT if guarded else _ANY))


def changing(*codes: int, body: bool = True) -> Responses:
    """Return the problems of a route that changes something: `codes`, and those of all such routes."""
    return _described(*codes, *_STRICT, *_ANY_BODY, *((400,) if body else ()))


def _described(*codes: int) -> Responses:
    return {code: {"description": HTTPStatus(code).phrase} for code in sorted(set(codes))}


class Description:
    """The description of `app`. Assign it to `app.openapi`. Thread-safe. Building it takes 0.1 s without a pause, so
    the server builds it once, on a thread, and keeps the bytes."""

    def __init__(self, app: FastAPI) -> None:
        self._app, self._make, self._lock = app, app.openapi, Lock()

    def __call__(self) -> dict[str, Any]:
        """Build the description. Each call builds it again."""
        with self._lock:
            schema = _complete(self._make())
            self._app.openapi_schema = None  # otherwise FastAPI would return this one again
            return schema

    @cached_property
    def document(self) -> bytes:
        return json.dumps(self(), separators=(",", ":")).encode()

    @cached_property
    def page(self) -> Reference:
        """The page that shows the description to people."""
        return reference(json.loads(self.document))


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    """Add problems, examples and security to the parts that FastAPI has described."""
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for view in (ProblemView, EventView):
        description = TypeAdapter(view).json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(description.pop("$defs", {}))
        schemas[view.__name__] = description
    for name, described in schemas.items():
        if name in EXAMPLES:
            described["examples"] = [EXAMPLES[name]]
        if "additionalProperties" not in described:  # it is an answer and not a body, so it always has all fields
            described["required"] = list(described["properties"])
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    responses = components.setdefault("responses", {})
    for item in schema["paths"].values():
        for method, operation in item.items():
            _describe_operation(method, operation, responses)
    return schema


def _describe_operation(method: str, operation: dict[str, Any], shared: dict[str, Any]) -> None:
    if method != "get" or "401" in operation["responses"]:
        operation.setdefault("security", [{"token": []}, {}])
    for status, response in operation["responses"].items():
        media = response.get("content", {})
        if int(status) < 400 or "text/plain" in media:
            continue
        name = f"Problem{status}"
        shared[name] = {
            "description": HTTPStatus(int(status)).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemView"}}},
        }
        operation["responses"][status] = {"$ref": f"#/components/responses/{name}"}
