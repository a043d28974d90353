"""`Idempotency-Key`: a POST that is sent again gets the first answer again and is not carried out twice."""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow_api.auth import ACTOR, is_reading
from kvstow_api.problems import problem
from kvstow_api.requests import CHANGED_NOTHING

MAX_KEYS = 1000  # of one actor
MAX_BYTES = 4 << 20  # of one actor's kept answers together
KEPT_SECONDS = 3600.0
MAX_KEY_LENGTH = 255

_KEY = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_KEY_LENGTH)


@dataclass(slots=True)
class _Kept:
    """A request, and its answer once it is complete."""

    fingerprint: bytes
    born: float
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    complete: bool = False


class _Answers:
    """The kept answers of one actor, by key. Not locked: used on the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> _Kept | None:
        return self._kept.get(key)

    def begin(self, key: bytes, entry: _Kept) -> None:
        self._kept[key] = entry

    def complete(self, entry: _Kept) -> None:
        entry.complete = True
        self._bytes += entry.size

    def drop(self, key: bytes) -> None:
        """Forget a request that is under way."""
        self._kept.pop(key, None)

    def forget(self, born_before: float) -> None:
        """Drop complete entries that are too old, too many or too large, the oldest first. Entries under way are
        bounded by the number of connections."""
        for key, entry in list(self._kept.items()):
            if entry.born >= born_before and len(self._kept) <= MAX_KEYS and self._bytes <= MAX_BYTES:
                break
            if entry.complete:
                del self._kept[key]
                self._bytes -= entry.size


class IdempotencyMiddleware:
    """Keeps the answers to POSTs with a key: at most 1,000 keys and 4 MiB for each actor, each for an hour. The oldest
    are dropped first.

    A key belongs to the actor who sent it: no other actor can see its answer, conflict with it, or evict it.
    Requests that only read ignore the header. The number of actors is bounded by the credentials that the operator has
    issued.

    The same key with a different request gets 422, and 409 while the first is under way. An error is not kept: the
    client may correct the request and send it again with the same key. Runs on the event loop, after the
    middlewares that read the body and identify the actor.
    """

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._answers: dict[str, _Answers] = {}  # by actor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = [value for name, value in scope.get("headers", ()) if name == b"idempotency-key"]
        if not keys or scope["type"] != "http" or not _takes_keys(scope):
            await self._app(scope, receive, send)
            return
        if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
            detail = f"Idempotency-Key must be given once, as 1 to {MAX_KEY_LENGTH} visible ASCII characters"
            await problem(scope, 422, detail)(scope, receive, send)
            return
        message = await receive()
        fingerprint = _fingerprint(scope, message.get("body", b""))
        self._forget_old()
        answers = self._answers.setdefault(scope.get(ACTOR, "anonymous"), _Answers())
        known = answers.get(keys[0])
        if known is None:
            entry = _Kept(fingerprint, self._clock())
            answers.begin(keys[0], entry)
            await self._run(answers, keys[0], entry, scope, _again(message, receive), send)
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

    async def _run(
        self, answers: _Answers, key: bytes, entry: _Kept, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def record(message: Message) -> None:
            entry.messages.append(message)
            entry.size += len(message.get("body", b""))
            await send(message)

        succeeded = False
        try:
            await self._app(scope, receive, record)
            succeeded = bool(entry.messages) and entry.messages[0]["status"] < 400
        finally:
            if succeeded:
                _mark_replayed(entry.messages)
                answers.complete(entry)
                self._forget_old()
            else:
                answers.drop(key)

    def _forget_old(self) -> None:
        """O(actors + entries dropped)."""
        oldest = self._clock() - KEPT_SECONDS
        for actor, answers in list(self._answers.items()):
            answers.forget(oldest)
            if not len(answers):
                del self._answers[actor]


def _takes_keys(scope: Scope) -> bool:
    return scope["method"] == "POST" and not is_reading(scope["method"], scope["path"])


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    """A hash of path, query and body: two requests with the same one are the same."""
    parts = (scope["path"].encode(), scope["query_string"], body)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _again(first: Message, receive: Receive) -> Receive:
    """A `receive` that returns `first` again, then the rest."""
    pending = [first]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _mark_replayed(messages: list[Message]) -> None:
    start = messages[0]
    messages[0] = {**start, "headers": [*start.get("headers", ()), (b"idempotency-replayed", b"true")]}
