"""Passes on hints in the words of others, which vLLM's API server drops from requests.

    vllm serve ... --middleware kvstow_service.connectors.middleware.HintsInBodies

vLLM's server accepts fields such as `prompt_cache_key` or `nvext`, but does not pass them on: a connector gets only
`kv_transfer_params` and `session_id`. This middleware adds to `kv_transfer_params` what the other words mean
(`kvstow_service.connectors.otherwords`). It runs only if an operator names it.

A request is passed on as it came, byte for byte, unless it has such a word. Then one field is added at the end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvstow_service.connectors.otherwords import WORDS, hints_in_body

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 16 << 20
"""The longest body, in bytes, in which hints are found. Parsing it takes 0.1 s of the server's event loop, which parses
it once more."""
_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
_QUOTED_WORDS = tuple(f'"{word}"'.encode() for word in WORDS)
_PARAMS, _FIELD = "kv_transfer_params", "kvstow"


class HintsInBodies:
    """ASGI middleware: adds to `kv_transfer_params` of a request's JSON body the hints that it has in other words."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        messages, is_whole = await _read(receive)
        if is_whole:
            body = b"".join(message.get("body", b"") for message in messages)
            changed = with_hints(body, has_session=_has_session_header(scope))
            if changed is not body:
                scope = {**scope, "headers": _with_length(scope["headers"], len(changed))}
                messages = [{"type": "http.request", "body": changed, "more_body": False}]

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)


async def _read(receive: Receive) -> tuple[list[Message], bool]:
    """The messages of a body, and whether they are the whole body. Reading ends early at `MOST_BYTES`, and if the
    client has gone."""
    messages, size = list[Message](), 0
    while size <= MOST_BYTES:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, False
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return messages, size <= MOST_BYTES
    return messages, False


def with_hints(body: bytes, *, has_session: bool = False) -> bytes:
    """The body with its hints in `kv_transfer_params`; the same object if it has none, or cannot be read. A body that
    vLLM would refuse is left for vLLM to refuse. `has_session`: whether the request's headers name its context.

    Hints in KVStow's own words take precedence, and `session_id` takes precedence over other names of the context."""
    if not any(word in body for word in _QUOTED_WORDS):  # this takes a thousandth of the time of parsing
        return body
    try:
        fields = json.loads(body)
        params = _params_with_hints(fields, has_session) if isinstance(fields, dict) else None
        added = None if params is None else json.dumps(params).encode()
    except (ValueError, RecursionError):
        return body
    if added is None:
        return body
    # If two fields have the same name, parsers of JSON take the last one.
    return b'%b,"%b":%b}' % (body.rstrip()[:-1], _PARAMS.encode(), added)


def _params_with_hints(fields: dict[str, Any], has_session: bool) -> dict[str, Any] | None:
    """The request's `kv_transfer_params` with the hints that its other words mean; None if there are none."""
    params = fields.get(_PARAMS, {})
    params = {} if params is None else params
    own = params.get(_FIELD, {}) if isinstance(params, dict) else None
    if not isinstance(own, dict):
        return None
    hints = hints_in_body(fields)
    if has_session or fields.get("session_id"):
        hints.pop("context", None)
    return {**params, _FIELD: {**hints, **own}} if hints else None


def _has_session_header(scope: Scope) -> bool:
    return any(name == b"x-session-id" and value for name, value in scope["headers"])


def _with_length(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    """The headers with the new length of the body. A body that comes in pieces has no length, and needs none."""
    return [(name, b"%d" % size if name == b"content-length" else value) for name, value in headers]
