"""Request bodies: JSON of limited size, received within a limited time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow_api.auth import READING_METHODS, is_reading, is_stranger
from kvstow_api.problems import problem

MAX_BODY_BYTES = 1 << 20
MAX_READING_BODY_BYTES = 64 << 10
"""For unauthenticated requests that only read: parsing takes 10 ms, and 150 ms for 1 MiB."""
MAX_BODY_SECONDS = 10.0

BODY = "kvstow.body"
"""ASGI scope key of the body, once it has been read."""

_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"


class BodyMiddleware:
    """Reads the body before the route runs. Answers 413 above `limit` bytes (`reading_limit` for unauthenticated
    requests that only read), 408 if the body takes longer than `seconds`, and 415 if its content type is not JSON.
    Needs the actor, so it runs after `AuthMiddleware`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit: int = MAX_BODY_BYTES,
        reading_limit: int = MAX_READING_BODY_BYTES,
        seconds: float = MAX_BODY_SECONDS,
    ) -> None:
        self._app = app
        self._limit, self._reading_limit = limit, reading_limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING_METHODS:
            await self._app(scope, receive, send)
            return
        is_bounded = is_reading(scope["method"], scope["path"]) and is_stranger(scope)
        limit = self._reading_limit if is_bounded else self._limit
        try:
            async with asyncio.timeout(self._seconds):
                body = await _read(scope, receive, limit)
        except ClientDisconnect:
            return  # an incomplete body must not reach the route
        except TimeoutError:
            detail = f"the body did not arrive within {self._seconds:g} s"
            await problem(scope, 408, detail, headers={"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            detail = f"the body is larger than {limit} bytes"
            if is_bounded:
                detail += f" (limit for admins and the Unix socket: {self._limit} bytes)"
            await problem(scope, 413, detail, headers={"Connection": "close"})(scope, receive, send)
        elif body and not _is_json(scope):
            given = _header(scope, b"content-type").decode("latin-1")[:100]
            detail = f"Content-Type is {given!r}; allowed: {', '.join(_json_types(scope))}"
            await problem(scope, 415, detail)(scope, receive, send)
        else:
            scope[BODY] = body
            await self._app(scope, _replay(body, receive), send)


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body; None as soon as it exceeds the limit. Raises `ClientDisconnect`."""
    declared = _header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limit:
        return None
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            return None
    return bytes(body)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _json_types(scope: Scope) -> tuple[str, ...]:
    return (_JSON, _MERGE_PATCH) if scope["method"] == "PATCH" else (_JSON,)


def _is_json(scope: Scope) -> bool:
    given = _header(scope, b"content-type").decode("latin-1")
    return given.partition(";")[0].strip().lower() in _json_types(scope)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body`, and then what follows it (a disconnect)."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
