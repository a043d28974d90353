"""The middleware around every request: ids, metrics and the audit log; framing and Host names; the body; HEAD."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow.attach.wire import CONTENT_TYPE
from kvstow.stats import Histogram
from kvstow_api.auth import ACTOR, READING_METHODS, is_admin, is_known, is_polled, is_reading, is_report, is_stranger
from kvstow_api.hostsettings import is_loopback, normal_host
from kvstow_api.journal import Journal
from kvstow_api.problems import REQUEST_ID, internal_problem, method_not_allowed, problem

logger = logging.getLogger("kvstow.api")
audit_logger = logging.getLogger("kvstow.audit")

CHANGED_NOTHING = "kvstow.changed_nothing"
"""A key of ASGI scopes. It is true for a dry run, and when a stored response is sent again."""

UNMATCHED = "unmatched"
CLIENT_CLOSED = 499  # nginx's status for a client that has disconnected before the response

_REFUSAL_SECONDS = 60.0  # the audit log has one line in this time for each caller whose requests are refused
_MAX_CALLERS = 1000  # how many callers are counted separately; the requests of others are counted together
_BOUNDS = (0.01, 0.1, 1.0, 10.0)
_MAX_SHOWN = 500  # how many characters of a body the audit log shows
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IN_URL = re.compile(rb"://[^/?#\s\"]*@")
_SECRET = re.compile(
    rb"""(["']?[\w.-]*(?:token|secret|passw|credential|authorization|api-?_?key)[\w.-]*["']?\s*[=:]\s*)"""
    rb"""("(?:[^"\\]|\\.)*"?|'[^']*'?|[^&,;\s}]+)""",
    re.IGNORECASE,
)
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
_REPORT_ROUTE = "/v1/ranks/{rank}/report"
_ADDED_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class HttpCounters:
    """Counts requests by method, route template and status. A series begins with its first request, because zeros for
    all possible series made up two thirds of a scrape. Their number is limited by the routes and statuses. Used on the
    event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(partial(Histogram, _BOUNDS))
        self.inflight = 0

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, str(status)] += 1
        self.seconds[method, route].observe(seconds)


class RequestMiddleware:
    def __init__(self, app: ASGIApp, *, counters: HttpCounters, journal: Journal) -> None:
        self._app = app
        self._counters = counters
        self._journal = journal
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = _request_id(scope)
        answer = _Answer(send, scope[REQUEST_ID])
        started = time.perf_counter()
        self._counters.inflight += 1
        try:
            await self._run(scope, receive, answer)
        finally:
            self._counters.inflight -= 1
            method, route = scope["method"] if scope["method"] in _METHODS else "other", _template(scope)
            self._counters.count(method, route, answer.status, time.perf_counter() - started)
            self._refusals.write_counts()
            if not is_reading(scope["method"], scope["path"]):
                self._audit(scope, method, route, answer.status)

    def _audit(self, scope: Scope, method: str, route: str, status: int) -> None:
        """Log each request for a change, and add each change that was made to the journal."""
        changed = status < 400 and not scope.get(CHANGED_NOTHING)
        routine = route == _REPORT_ROUTE and status < 400  # every rank reports every second
        actor, client = scope.get(ACTOR, "-"), (scope.get("client") or ("-",))[0]
        if status >= 400 and not is_admin(actor) and not self._refusals.is_first(f"{actor} at {client}"):
            return
        audit_logger.log(
            logging.DEBUG if routine else logging.INFO,
            "actor=%s client=%s method=%s route=%s path=%s status=%d request_id=%s changed=%s query=%s body=%s",
            actor,
            client,
            method,
            route,
            _path(scope),
            status,
            scope[REQUEST_ID],
            "yes" if changed else "no",
            _shown(scope.get("query_string", b"")),
            _shown(scope.get(BODY, b"")),
        )
        if changed and not routine:
            given = {"path": _path(scope), "status": status, "request_id": scope[REQUEST_ID]}
            self._journal.add("change", actor=actor, method=method, **given)

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception:  # every request needs an answer, even if its route has a defect
            logger.exception("request %s failed: %s %s", scope[REQUEST_ID], scope["method"], _path(scope))
            if answer.started:
                raise  # half a response was sent, so the server must close the connection
            await internal_problem(scope)(scope, receive, answer)


class _Answer:
    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [(b"x-request-id", request_id.encode()), *_ADDED_HEADERS]
        self.status = CLIENT_CLOSED
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


@dataclass(slots=True)
class _Refused:
    """A caller whose request was refused: when that was, and how many more of its requests were refused since."""

    since: float
    more: int = 0


class RefusalLog:
    """Decides which refused requests get a line in the audit log: one a minute for each caller. At the end of the
    minute, another line has the number of the others.

    Changes that were made, and all requests of admins, have a line each. Refusals share no limit with them, so a flood
    of refusals hides no change. Used on the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[str, _Refused] = {}  # by caller, in the order of their first refusals

    def is_first(self, caller: str) -> bool:
        """Count a refused request, and return whether it is the caller's first one in this minute."""
        self.write_counts()
        if caller not in self._refused and len(self._refused) >= _MAX_CALLERS:
            caller = "others"
        known = self._refused.get(caller)
        if known is None:
            self._refused[caller] = _Refused(self._clock())
            return True
        known.more += 1
        return False

    def write_counts(self) -> None:
        """Write the number of refused requests for each caller whose minute has passed. Called with every request."""
        now = self._clock()
        while self._refused:
            caller, oldest = next(iter(self._refused.items()))
            if now - oldest.since < _REFUSAL_SECONDS:
                break
            del self._refused[caller]
            if oldest.more:
                audit_logger.info("%d more requests of %s were refused within a minute", oldest.more, caller)


def _request_id(scope: Scope) -> str:
    """Return the client's request id, without characters that are unsafe in a log line, or a new id."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return _NOT_IN_ID.sub("", given.decode("latin-1"))[:64] or secrets.token_hex(8)


def _template(scope: Scope) -> str:
    route = scope.get("route")  # set by the router
    if route is None:
        routes = scope["app"].router.routes
        route = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
    return getattr(route, "path", UNMATCHED)


def _path(scope: Scope) -> str:
    """Return the path as it was received: percent-encoded, so it is safe in a log line."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw.decode("latin-1"))[1:-1]


def _shown(text: bytes) -> str:
    """Return text of a client for a log line: shortened, on one line, without passwords in URLs, and without values
    whose names say that they are secret."""
    shown = ascii(_SECRET.sub(rb"\1...", _IN_URL.sub(b"://...@", text))[: _MAX_SHOWN + 1].decode("utf-8", "replace"))[
        1:-1
    ]
    return (shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}...") or "-"


class TimeAllowance:
    """Time of the interpreter that answers may use: `share` of each second. Up to `most` seconds are saved up. Time
    used beyond that is owed. Used on the event loop."""

    def __init__(self, share: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._most, self._clock = share, most, clock
        self._left, self._at = most, clock()

    @property
    def seconds_owed(self) -> float:
        """How long it takes until time may be used again. 0 if some is left."""
        self._fill()
        return max(0.0, -self._left / self._share)

    def use(self, seconds: float) -> None:
        self._fill()
        self._left -= seconds

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._share)
        self._at = now


_ANONYMOUS_SHARE, _MOST_SAVED_SECONDS = 0.05, 0.5
"""The share of each of the two allowances, and how much of it is saved up, in seconds."""
_LONGEST_TURN_SECONDS = 1.0
"""How long a request without a credential waits for its allowance at most."""
_REQUEST_SECONDS = 0.0005
"""The server's own time for a request, for reading its head and writing the answer, in seconds."""


class AnonymousMiddleware:
    """Limits the share of the interpreter that is used to answer callers without a credential, so that a flood of
    requests does not slow down the engine in the same process.

    Probes and metrics have one allowance, and all other requests another. When it is used up, a request waits for at
    most one second, and is then answered with 503 and Retry-After. Waiting costs nothing, and a client that waits sends
    nothing else over its connection. This middleware needs the actor, so it runs after `AuthMiddleware`. It counts the
    refusals of that, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`cpu_clock` returns the seconds for which this thread has computed. `sleep` waits for seconds."""
        self._app = app
        self._cpu_clock, self._sleep = cpu_clock, sleep
        self._polled = TimeAllowance(_ANONYMOUS_SHARE, _MOST_SAVED_SECONDS, clock)
        self._others = TimeAllowance(_ANONYMOUS_SHARE, _MOST_SAVED_SECONDS, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_known(scope.get(ACTOR)):
            await self._app(scope, receive, send)
            return
        allowance = self._polled if is_polled(scope["path"]) else self._others
        if owed := allowance.seconds_owed:
            await self._sleep(min(owed, _LONGEST_TURN_SECONDS))
        allowance.use(_REQUEST_SECONDS)
        if allowance.seconds_owed > _LONGEST_TURN_SECONDS:
            detail = "the server gets too many requests without a credential; it answers requests with one"
            await problem(scope, 503, detail, headers={"Retry-After": "1"})(scope, receive, send)
            return
        await _Metered(self._app(scope, receive, send), allowance, self._cpu_clock)


class _Metered:
    """Awaits a coroutine, and deducts from the allowance the time that each of its steps computes."""

    def __init__(self, coroutine: Awaitable[None], allowance: TimeAllowance, cpu_clock: Callable[[], float]) -> None:
        """`coroutine` is what the call of an ASGI application returns."""
        self._coroutine = cast(Coroutine[Any, Any, None], coroutine)
        self._allowance, self._cpu_clock = allowance, cpu_clock

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            begun = self._cpu_clock()
            try:
                awaited = step(value)
            except StopIteration:
                return
            finally:
                self._allowance.use(self._cpu_clock() - begun)
            try:
                step, value = self._coroutine.send, (yield awaited)
            except BaseException as error:  # noqa: BLE001 - the coroutine gets every error, cancellations included
                step, value = self._coroutine.throw, error


_PORT = re.compile(r":\d+$")
_CLOSE = {"Connection": "close"}


class AdmissionMiddleware:
    """Answers 411 to bodies without a length, and 400 to other bodies that do not belong to their request, and closes
    the connection. Answers 421 to an unknown Host name.

    `allowed_hosts` are Host names, besides those of loopback, that a server on loopback accepts over TCP. Otherwise a
    web page could point a name of its own at loopback (DNS rebinding), and read what is open to this machine. None
    allows any name. It is for servers on other addresses, where probes use the address of a pod.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Sequence[str] | None) -> None:
        self._app = app
        self._allowed = None if allowed_hosts is None else frozenset(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._judge(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _judge(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:  # its trailers may have thousands of lines, which h11 parses for 10 ms
            detail = "the request has a Transfer-Encoding; send its body with a Content-Length"
            return problem(scope, 411, detail, headers=_CLOSE)
        if scope["method"] in READING_METHODS and headers.get(b"content-length") not in (None, b"0"):
            if (refusal := method_not_allowed(scope)) is not None:
                refusal.headers["Connection"] = "close"
                return refusal
            detail = f"{scope['method']} requests take no body"
            return problem(scope, 400, detail, code="malformed_request", headers=_CLOSE)
        if self._allowed is None or not _is_tcp(scope):
            return None
        host = headers.get(b"host")
        name = None if host is None else normal_host(_PORT.sub("", host.decode("latin-1")))
        if name is None or name in self._allowed or is_loopback(name.strip("[]")):
            return None
        names = ", ".join(["localhost", "the address", *sorted(self._allowed)])
        detail = f"unknown Host {name[:100]!r}; allowed: {names}. Add names with the setting allowed_hosts"
        return problem(scope, 421, detail, code="unknown_host")


def _is_tcp(scope: Scope) -> bool:
    """Whether the request came over TCP. A Unix socket has no port, and browsers cannot reach it."""
    server = scope.get("server")
    return server is not None and server[1] is not None


MAX_BODY_BYTES = 1 << 20
MAX_READING_BODY_BYTES = 64 << 10
"""The limit for unauthenticated requests that only read. Parsing that much takes 10 ms, and 1 MiB takes 150 ms."""
MAX_BODY_SECONDS = 10.0

BODY = "kvstow.body"
"""The key of the body in an ASGI scope, once it has been read."""

_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"


class BodyMiddleware:
    """Reads the body before the route runs. Answers 413 to more than `limit` bytes (`reading_limit` for unauthenticated
    requests that only read), 408 if the body takes longer than `seconds`, and 415 if its content type is not JSON, or
    that of a packed message for a rank's report. It needs the actor, so it runs after `AuthMiddleware`."""

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
        headers, allowed = Headers(scope=scope), _content_types(scope)
        try:
            async with asyncio.timeout(self._seconds):
                body = await _read(scope, receive, limit)
        except ClientDisconnect:
            return  # because an incomplete body must not reach the route
        except TimeoutError:
            detail = f"the body did not arrive within {self._seconds:g} s"
            await problem(scope, 408, detail, headers={"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            detail = f"the body is larger than {limit} bytes"
            if is_bounded:
                detail += f" (limit for admins and the Unix socket: {self._limit} bytes)"
            await problem(scope, 413, detail, headers={"Connection": "close"})(scope, receive, send)
        elif body and (kind := headers.get("content-type", "")).partition(";")[0].strip().lower() not in allowed:
            detail = f"Content-Type is {kind[:100]!r}; allowed: {', '.join(allowed)}"
            await problem(scope, 415, detail)(scope, receive, send)
        else:
            scope[BODY] = body
            await self._app(scope, _replay(body, receive), send)


def _content_types(scope: Scope) -> Sequence[str]:
    """The content types that a request of this method to this path may have."""
    if is_report(scope["path"]):
        return (CONTENT_TYPE,)
    return (_JSON, _MERGE_PATCH) if scope["method"] == "PATCH" else (_JSON,)


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """Return the whole body, or None if its declared length exceeds the limit. The server reads no more than that
    length, and `AdmissionMiddleware` refuses a body without one. Raises `ClientDisconnect`."""
    declared = Headers(scope=scope).get("content-length", "")
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
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


class HeadMiddleware:
    """Lets routes that define only GET answer HEAD. A stream is ended after its headers, because its body never
    ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _Answered

        try:
            await self._app(as_get, receive, send_head)
        except _Answered:
            pass
        finally:
            scope["route"] = as_get.get("route")  # because requests are counted by route


class _Answered(Exception):
    """Raised to end a stream after its headers."""
