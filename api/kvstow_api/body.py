"""What a request body may be: JSON of a bounded size, and nothing that only looks like a number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from math import isfinite
from typing import Any, Never

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow_api.auth import READING_METHODS
from kvstow_api.problems import problem

MAX_BODY_BYTES = 1 << 20
MAX_BODY_SECONDS = 10.0

_JSON_TYPES = (b"application/json", b"application/merge-patch+json")
_MAX_INTEGER = 1 << 63


class BodyMiddleware:
    """Reads the body before the route runs: 413 above `limit` bytes, 408 if it is not there in `seconds`, 415 if it is
    not declared as JSON."""

    def __init__(self, app: ASGIApp, *, limit: int = MAX_BODY_BYTES, seconds: float = MAX_BODY_SECONDS) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING_METHODS:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except ClientDisconnect:
            return  # half of a body must not be taken for the whole
        except TimeoutError:
            detail = f"the body did not arrive in {self._seconds:g} s"
            await problem(scope, 408, detail, headers={"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            detail = f"the body is too large; allowed: {self._limit} bytes"
            await problem(scope, 413, detail, headers={"Connection": "close"})(scope, receive, send)
        elif body and not _is_json(scope):
            await problem(scope, 415, "the body must be of type application/json")(scope, receive, send)
        else:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None as soon as it is known to be too large. Raises `ClientDisconnect`."""
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._limit:
            return None
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                return None
        return bytes(body)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_json(scope: Scope) -> bool:
    allowed = _JSON_TYPES if scope["method"] == "PATCH" else _JSON_TYPES[:1]
    return _header(scope, b"content-type").split(b";")[0].strip().lower() in allowed


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body`, then what comes after it (the client leaving)."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


class StrictRequest(Request):
    """A request whose JSON has only finite numbers and integers of 64 bits."""

    async def json(self) -> Any:
        text = await self.body()
        try:
            return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_integer)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """A route that reads its body as `StrictRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


def _refuse(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not -_MAX_INTEGER <= int(text) < _MAX_INTEGER:
        raise ValueError(f"{text[:40]} is not an integer of 64 bits")
    return int(text)
