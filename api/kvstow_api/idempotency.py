"""`Idempotency-Key`: a POST that is sent again is answered again, and not done twice."""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow_api.problems import problem
from kvstow_api.requests import CHANGED_NOTHING

MAX_KEYS = 1000
MAX_BYTES = 4 << 20  # of all kept answers together
KEPT_SECONDS = 3600.0
MAX_KEY_LENGTH = 255

_KEY = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_KEY_LENGTH)


@dataclass(slots=True)
class _Kept:
    """A request, and its answer once that is complete."""

    fingerprint: bytes
    born: float
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    complete: bool = False


class IdempotencyMiddleware:
    """Keeps the answers to POSTs that carry a key: 1,000 keys, 4 MiB and an hour at most, the oldest go first.

    The same key with another request answers 422; while the first is under way, 409. An error is not kept: the request
    may be mended, and tried again with its key. Comes after those who read the body and know the actor; on the event
    loop.
    """

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = [value for name, value in scope.get("headers", ()) if name == b"idempotency-key"]
        if scope["type"] != "http" or scope["method"] != "POST" or not keys:
            await self._app(scope, receive, send)
            return
        if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
            detail = f"Idempotency-Key must be given once, as 1 to {MAX_KEY_LENGTH} visible ASCII characters"
            await problem(scope, 422, detail)(scope, receive, send)
            return
        message = await receive()
        fingerprint = _fingerprint(scope, message.get("body", b""))
        self._forget_old()
        known = self._kept.get(keys[0])
        if known is None:
            await self._run(keys[0], fingerprint, scope, _again(message, receive), send)
        elif known.fingerprint != fingerprint:
            detail = "this Idempotency-Key was used for another request; a new request needs a new key"
            await problem(scope, 422, detail, code="idempotency_key_reused")(scope, receive, send)
        elif not known.complete:
            detail = "the request with this Idempotency-Key is under way"
            refusal = problem(scope, 409, detail, code="request_in_progress", headers={"Retry-After": "1"})
            await refusal(scope, receive, send)
        else:
            scope[CHANGED_NOTHING] = True
            for kept in known.messages:
                await send(kept)

    async def _run(self, key: bytes, fingerprint: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._kept[key] = _Kept(fingerprint, self._clock())

        async def record(message: Message) -> None:
            entry.messages.append(message)
            entry.size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, record)
            entry.complete = bool(entry.messages) and entry.messages[0]["status"] < 400
        finally:
            if entry.complete:
                _mark_replayed(entry.messages)
                self._bytes += entry.size
                self._forget_old()
            else:
                self._kept.pop(key, None)

    def _forget_old(self) -> None:
        """Drop complete entries that are too old, too many or too large; those under way are bounded by the number
        of connections."""
        oldest = self._clock() - KEPT_SECONDS
        for key, entry in list(self._kept.items()):
            if entry.born >= oldest and len(self._kept) <= MAX_KEYS and self._bytes <= MAX_BYTES:
                break
            if entry.complete:
                del self._kept[key]
                self._bytes -= entry.size


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    """Of what makes two requests the same, with a hash of it in place of the body."""
    parts = (scope["path"].encode(), scope["query_string"], body)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _again(first: Message, receive: Receive) -> Receive:
    """A `receive` that gives `first` once more."""
    pending = [first]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _mark_replayed(messages: list[Message]) -> None:
    start = messages[0]
    messages[0] = {**start, "headers": [*start.get("headers", ()), (b"idempotency-replayed", b"true")]}
