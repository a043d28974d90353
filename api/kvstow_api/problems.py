"""Errors as `application/problem+json` (RFC 9457).

A table maps the engine's errors to statuses. Internal errors are answered with 500 and no details. The log has the
details, under the request id that the response has as `instance`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import isfinite
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from kvstow.errors import (
    ConfigError,
    ConflictError,
    DataPlaneFailedError,
    InsufficientMemoryError,
    InvalidRequestError,
    KvstowError,
    LeaseError,
    NotFoundError,
    QueueFullError,
)

logger = logging.getLogger("kvstow.api")

MEDIA_TYPE = "application/problem+json"
REQUEST_ID = "kvstow.request_id"
"""The key of the request id in an ASGI scope."""

_STATUS_OF: dict[type[KvstowError], int] = {
    InvalidRequestError: 422,
    ConfigError: 422,
    NotFoundError: 404,
    ConflictError: 409,
    LeaseError: 409,
    InsufficientMemoryError: 507,
    QueueFullError: 503,
    DataPlaneFailedError: 503,
    KvstowError: 500,
}

_CODE_OF: dict[int, str] = {
    400: "malformed_body",
    408: "body_too_slow",
    413: "body_too_large",
    422: "invalid_request",
    431: "head_too_large",
    500: "internal",
    503: "unavailable",
    507: "insufficient_memory",
}
"""Error codes that differ from the name of the status."""

MAX_ERRORS = 20
"""The limit for the errors in one response. A body of 1 MiB could have half a million of them."""
_MAX_ECHO = 200  # how many characters of an invalid value the response repeats


def problem(
    scope: Scope,
    status: int,
    detail: str,
    *,
    code: str | None = None,
    errors: Sequence[Mapping[str, Any]] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Make the problem response to the request of `scope`. A `Retry-After` header is repeated in the body."""
    code = code or _CODE_OF.get(status) or HTTPStatus(status).name.lower()
    retry_after = (headers or {}).get("Retry-After")
    body = {
        "type": f"urn:kvstow:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": scope.get(REQUEST_ID, ""),
        "code": code,
        "errors": list(errors),
        "retry_after": int(retry_after) if retry_after else None,
    }
    # In ASCII, because an invalid value may have characters that UTF-8 cannot encode, such as lone surrogates.
    content = json.dumps(body, ensure_ascii=True, allow_nan=False)
    return Response(content, status, dict(headers or {}), MEDIA_TYPE)


def internal_problem(scope: Scope) -> Response:
    return problem(scope, 500, "the server has failed to answer; its log has the error under this request id")


def method_not_allowed(scope: Scope) -> Response | None:
    """Return a 405 with every method that the path allows. Returns None if it allows this method, or does not exist."""
    as_get = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
    allowed: set[str] = set()
    for route in scope["app"].router.routes:
        match, _ = route.matches(as_get)
        if match is Match.FULL:
            return None
        if match is Match.PARTIAL:
            allowed |= route.methods
    if not allowed:
        return None
    methods = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
    detail = f"{scope['method'][:_MAX_ECHO]} is not allowed here; allowed: {methods}"
    return problem(scope, 405, detail, headers={"Allow": methods})


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(KvstowError, _on_kvstow)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
        detail = f"{request.url.path[:_MAX_ECHO]} does not exist"
    if error.status_code == 405 and (answer := method_not_allowed(request.scope)) is not None:
        return answer
    return problem(request.scope, error.status_code, detail, headers=error.headers)


async def _on_kvstow(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvstowError)
    status = next(_STATUS_OF[cls] for cls in type(error).__mro__ if cls in _STATUS_OF)
    if status == 500:
        logger.error("request %s failed", request.scope.get(REQUEST_ID), exc_info=error)
        return internal_problem(request.scope)
    errors = []
    if isinstance(error, ConfigError):
        errors.append(
            {"field": error.key, "message": str(error), "value": _echo(error.value), "allowed": error.allowed}
        )
    headers = {"Retry-After": "1"} if status == 503 else None
    return problem(request.scope, status, str(error), code=error.code, errors=errors, headers=headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        reason, position = found[0].get("ctx", {}).get("error", ""), found[0]["loc"][-1]
        place = f" (at character {position})" if position else ""
        return problem(request.scope, 400, f"the body is not JSON: {reason}{place}")
    errors = [_describe(item, request.scope) for item in found[:MAX_ERRORS]]
    detail = "; ".join(map(_in_words, errors))
    return problem(request.scope, 422, detail, errors=errors)


def _describe(item: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    where, *path = item["loc"]
    field = ".".join(str(part) for part in path) or str(where)
    context, message = item.get("ctx", {}), item["msg"]
    allowed = context.get("allowed") or context.get("expected") or message
    if item["type"] == "extra_forbidden":
        allowed = ", ".join(_names_beside(scope["route"], item["loc"]))
        message = f"Unknown field; known: {allowed}"
    if item["type"] == "missing" and not path:
        allowed = ", ".join(_names_beside(scope["route"], (where, "")))
        message = f"A JSON object is needed; its fields: {allowed}"
    value = None if item["type"] == "missing" else _echo(item.get("input"))
    return {"field": field, "message": message, "value": value, "allowed": str(allowed)}


def _names_beside(route: APIRoute, where: Sequence[str]) -> list[str]:
    """Return the other names that the route's body defines beside an unknown one. `where` is the path to that name."""
    model = None if route.body_field is None else route.body_field.field_info.annotation
    for name in where[1:-1]:
        model = model.model_fields[name].annotation  # type: ignore[union-attr]
    return [field.alias or name for name, field in getattr(model, "model_fields", {}).items()]


def _in_words(error: Mapping[str, Any]) -> str:
    value = error["value"]
    return f"{error['field']}{'' if value is None else f' is {value!r}'}: {error['message']}"


def _echo(value: Any) -> Any:
    """Return `value` in a form that is safe to repeat: short, and valid JSON."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."
