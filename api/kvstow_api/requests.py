"""Request ids, request metrics, the audit log, and the handling of unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstow.stats import Histogram
from kvstow_api.auth import ACTOR, is_known, is_reading
from kvstow_api.body import BODY
from kvstow_api.journal import Journal
from kvstow_api.limitedlog import LimitedLog
from kvstow_api.problems import REQUEST_ID, internal_problem

logger = logging.getLogger("kvstow.api")
audit_logger = logging.getLogger("kvstow.audit")

CHANGED_NOTHING = "kvstow.changed_nothing"
"""ASGI scope key: true for a dry run, and for the replay of a stored response."""

UNMATCHED = "unmatched"
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before the response

_REFUSALS_A_MINUTE = 60  # log lines about refused unauthenticated requests
_BOUNDS = (0.01, 0.1, 1.0, 10.0)
_MAX_SHOWN = 500  # characters of a body in the audit log
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_IN_URL = re.compile(rb"://[^/?#\s\"]*@")
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
_REPORT_ROUTE = "/v1/ranks/{rank}/report"
_ADDED_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class RouteKey(NamedTuple):
    method: str
    route: str


class HttpCounters:
    """Requests by method, route template and status. A series begins with its first request: zeros for all possible
    ones made up two thirds of a scrape. Bounded by the number of routes and statuses. Counted on the event loop, read
    on any thread."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[RouteKey, Histogram] = {}
        self.inflight = 0

    def count(self, key: RouteKey, status: int, seconds: float) -> None:
        series = (*key, str(status))
        self._requests[series] = self._requests.get(series, 0) + 1
        if key not in self._seconds:
            self._seconds[key] = Histogram(_BOUNDS)
        self._seconds[key].observe(seconds)

    def requests(self) -> dict[tuple[str, str, str], int]:
        """By method, route and status."""
        return self._requests.copy()

    def seconds(self) -> dict[RouteKey, Histogram]:
        return {key: histogram.copy() for key, histogram in self._seconds.copy().items()}


class RequestMiddleware:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, *, counters: HttpCounters, journal: Journal) -> None:
        self._app = app
        self._counters = counters
        self._journal = journal
        self._refused = LimitedLog(audit_logger, burst=_REFUSALS_A_MINUTE)

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
            key = RouteKey(scope["method"] if scope["method"] in _METHODS else "other", _template(scope))
            self._counters.count(key, answer.status, time.perf_counter() - started)
            if not is_reading(scope["method"], scope["path"]):
                self._audit(scope, key, answer.status)

    def _audit(self, scope: Scope, key: RouteKey, status: int) -> None:
        """Log each request for a change, and add each change that was made to the journal."""
        changed = status < 400 and not scope.get(CHANGED_NOTHING)
        routine = key.route == _REPORT_ROUTE and status < 400  # every rank, every second
        if is_known(scope.get(ACTOR)) or status < 400:
            _write_audit(audit_logger.log, scope, key, status, changed, logging.DEBUG if routine else logging.INFO)
        else:
            _write_audit(self._refused.log, scope, key, status, changed, logging.INFO)
        if changed and not routine:
            self._journal.add(
                "change",
                actor=scope.get(ACTOR, "-"),
                method=key.method,
                path=_path(scope),
                status=status,
                request_id=scope[REQUEST_ID],
            )

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception:  # no error of a route may leave a request unanswered
            logger.exception("request %s failed: %s %s", scope[REQUEST_ID], scope["method"], _path(scope))
            if answer.started:
                raise  # the response has begun: the server closes the connection
            await internal_problem(scope)(scope, receive, answer)


class _Answer:
    """A `send` that adds headers and records the status."""

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


def _request_id(scope: Scope) -> str:
    """The client's request id, without characters that are unsafe in a log line, or a new id."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return _NOT_IN_ID.sub("", given.decode("latin-1"))[:64] or secrets.token_hex(8)


def _template(scope: Scope) -> str:
    """The template of the route that handled the request, or that matches it if a middleware answered."""
    route = scope.get("route")  # set by the router
    if route is None:
        routes = scope["app"].router.routes
        route = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
    return getattr(route, "path", UNMATCHED)


def _path(scope: Scope) -> str:
    """The path as received: percent-encoded, which is safe in a log line."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw.decode("latin-1"))[1:-1]


def _write_audit(log: Callable[..., None], scope: Scope, key: RouteKey, status: int, changed: bool, level: int) -> None:
    client = scope.get("client")
    log(
        level,
        "actor=%s client=%s method=%s route=%s path=%s status=%d request_id=%s changed=%s query=%s body=%s",
        scope.get(ACTOR, "-"),
        client[0] if client else "-",
        key.method,
        key.route,
        _path(scope),
        status,
        scope[REQUEST_ID],
        "yes" if changed else "no",
        _shown(scope.get("query_string", b"")),
        _shown(scope.get(BODY, b"")),
    )


def _shown(text: bytes) -> str:
    """What a client sent, shortened, on one line, and without passwords in URLs."""
    shown = ascii(_IN_URL.sub(b"://...@", text)[: _MAX_SHOWN + 1].decode("utf-8", "replace"))[1:-1]
    return (shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}...") or "-"
