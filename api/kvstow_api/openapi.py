"""The OpenAPI description: problems are described once, and every route names the ones it may answer."""

from __future__ import annotations

import json
from http import HTTPStatus
from threading import Lock
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from kvstow_api.auth import is_reading
from kvstow_api.idempotency import MAX_KEY_LENGTH
from kvstow_api.problems import MEDIA_TYPE
from kvstow_api.views.problem import ProblemView

Responses = dict[int | str, dict[str, Any]]

_STRICT = (401, 403, 422, 500, 503)  # 422: also for a query or a body where none is wanted
_ANY_BODY = (408, 413, 415)  # also of a body where none is wanted


def reading(*codes: int, guarded: bool = True) -> Responses:
    """Problems that a GET may answer: `codes`, and those that any may. Not `guarded`: it needs a token nowhere."""
    return _described(*codes, *(_STRICT if guarded else (500,)))


def changing(*codes: int, body: bool = True) -> Responses:
    """Problems that a route that changes something may answer: `codes`, and those that any such may."""
    return _described(*codes, *_STRICT, *_ANY_BODY, *((400,) if body else ()))


ETAG: Responses = {
    200: {"headers": {"ETag": {"description": "Names the settings as they are now", "schema": {"type": "string"}}}}
}


def _described(*codes: int) -> Responses:
    return {code: {"description": HTTPStatus(code).phrase} for code in sorted(set(codes))}


class Description:
    """The description of `app`, to be assigned to `app.openapi`. Thread-safe. Building it takes 0.1 s in one piece,

    so the server builds it once, on a thread, and keeps the bytes.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app, self._make = app, app.openapi
        self._lock = Lock()
        self._document: bytes | None = None

    def __call__(self) -> dict[str, Any]:
        """Built anew by each call."""
        with self._lock:
            schema = _share_problems(self._make())
            self._app.openapi_schema = None  # FastAPI would give this one out again
            return schema

    def document(self) -> bytes:
        """As JSON, built by the first call."""
        if self._document is None:
            self._document = json.dumps(self(), separators=(",", ":")).encode()
        return self._document


def _share_problems(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    description = TypeAdapter(ProblemView).json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(description.pop("$defs"))
    schemas["ProblemView"] = description
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    responses = components.setdefault("responses", {})
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            _describe_operation(method, path, operation, responses)
    return schema


_IDEMPOTENCY_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Sent again with the same key, within an hour, the request is answered again and not done twice",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH, "pattern": "^[!-~]+$"},
    "example": "resize-2026-11-02",
}


def _describe_operation(method: str, path: str, operation: dict[str, Any], shared: dict[str, Any]) -> None:
    if method != "get" or "401" in operation["responses"]:
        operation.setdefault("security", [{"token": []}, {}])
    if method == "post" and not is_reading("POST", path):
        operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
        operation["responses"].setdefault("409", {})  # the key is of a request under way
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
