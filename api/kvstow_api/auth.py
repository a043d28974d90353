"""Who may read and who may change things: bearer tokens, and client certificates.

Probes and metrics are open. Reading is, too, unless there is a file of viewer tokens: then it needs one of those,
an admin token or a client certificate. Changing needs an admin token or a certificate where either is configured.
The method decides, so a new route is covered without doing anything. A rank's report always needs a credential, on
every address: the agent's token, or what opens every change. The agent's token opens nothing else. Browsers, which
send no bearer token, may give a token as the password of Basic authentication, for reading only: they would attach it
to requests that another site's page makes, too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstow.errors import ConfigError
from kvstow_api.limitedlog import LimitedLog
from kvstow_api.problems import problem
from kvstow_api.tokens import TokenFile

logger = logging.getLogger("kvstow.api")

ACTOR = "kvstow.actor"
"""ASGI scope key of the actor: admin, certificate:SUBJECT, viewer, agent, or anonymous."""

_NOBODY = frozenset({None, "anonymous", "-"})

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

CERTIFICATE = "client_certificate"
"""Key in the `state` of an ASGI scope: the subject of the client's certificate, which the TLS layer has verified."""

_READING_POST = "/v1/lookup"  # a body, because a query has no room for a thousand keys
_PROBE_PATH = re.compile(r"/(livez|readyz|health|healthz|startupz)(/[^/]*)?")
_CERTIFICATE_ACTOR = "certificate:"
_MAX_LOOK_SECONDS = 2.0  # at the token files
_REPORT_PATH = re.compile(r"/v1/ranks/[^/]+/report")


def is_reading(method: str, path: str) -> bool:
    """Whether such a request changes nothing."""
    return method in READING_METHODS or (method == "POST" and path == _READING_POST)


def is_probe(path: str) -> bool:
    """Whether a request for `path` is one of the probes."""
    return _PROBE_PATH.fullmatch(path) is not None


def is_stranger(scope: Scope) -> bool:
    """Whether the request has no admin's credential, and did not come through a Unix socket, which only the server's
    user can open."""
    client = scope.get("client")
    return bool(client and client[0]) and not is_admin(scope.get(ACTOR, ""))


def is_admin(actor: str) -> bool:
    """Whether this actor, as named in a scope, has shown a credential that allows every change."""
    return actor == "admin" or actor.startswith(_CERTIFICATE_ACTOR)


def is_known(actor: object) -> bool:
    """Whether `actor`, of a request's scope, has shown a credential."""
    return actor not in _NOBODY


class Credentials(NamedTuple):
    """Whom the API obeys. `admins` and `viewers` hold tokens; `certificates`: a verified client certificate counts as
    an admin's token; `agent`: the token of the ranks' agents."""

    admins: TokenFile | None = None
    viewers: TokenFile | None = None
    agent: str | None = None
    certificates: bool = False

    @property
    def guard_changes(self) -> bool:
        return self.admins is not None or self.certificates

    @property
    def exposures(self) -> Mapping[str, str] | None:
        """Which other users may use each token file, by the name of its setting. None if no file is set."""
        files = {"token_file": self.admins, "viewer_token_file": self.viewers}
        given = {name: file.exposure for name, file in files.items() if file is not None}
        return {name: what for name, what in given.items() if what is not None} if given else None


class AuthMiddleware:
    """Lets a request through with its actor in the scope, or answers 401, 403 or 503 (token file unusable)."""

    def __init__(self, app: ASGIApp, *, credentials: Credentials) -> None:
        self._app = app
        self._credentials = credentials
        self._agent_token = credentials.agent.encode() if credentials.agent else None
        self._unusable = LimitedLog(logger)
        self._files = _Renewal([file for file in (credentials.admins, credentials.viewers) if file is not None])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reading = is_reading(scope["method"], scope["path"])
        token = _token(scope, reading)
        if token is not None and not self._is_agent(token):
            await self._files.renew()
        refusal = self._judge(scope, reading, token)
        await (refusal or self._app)(scope, receive, send)

    def _judge(self, scope: Scope, reading: bool, token: bytes | None) -> Response | None:
        """Put the actor into the scope, or say why the request is refused."""
        scope[ACTOR] = "anonymous"
        if reading and (self._credentials.viewers is None or _is_open(scope["path"])):
            with suppress(ConfigError):  # no token is required here; one still identifies an admin
                scope[ACTOR] = self._actor(scope, token) or "anonymous"
            return None
        if not reading and _is_cross_site(scope):
            return problem(scope, 403, "web pages of other sites may change nothing")
        try:
            actor = self._actor(scope, token)
        except ConfigError as error:
            self._unusable.log(logging.ERROR, "a token file cannot be used: %s", error)
            return problem(scope, 503, "the token file cannot be used; the log says why", headers={"Retry-After": "5"})
        scope[ACTOR] = actor or "-"
        if actor is None:
            return _unauthorized(scope, reading, token is not None)
        if actor == "agent" and not _REPORT_PATH.fullmatch(scope["path"]):
            return problem(scope, 403, "an agent's token opens only the report route")
        if actor == "viewer" and not reading:
            return problem(scope, 403, "a viewer's token opens only what reads")
        return None

    def _actor(self, scope: Scope, token: bytes | None) -> str | None:
        """Who asks; None for nobody who is known. Raises `ConfigError` for a token file that has none any more."""
        known = self._credentials
        certificate = scope.get("state", {}).get(CERTIFICATE) if known.certificates else None
        if certificate is not None:
            return f"{_CERTIFICATE_ACTOR}{certificate}"
        if token is not None:
            if self._is_agent(token):
                return "agent"
            if known.admins is not None and known.admins.accepts(token):
                return "admin"
            if known.viewers is not None and known.viewers.accepts(token):
                return "viewer"
        if known.guard_changes or _REPORT_PATH.fullmatch(scope["path"]):
            return None
        return "anonymous"

    def _is_agent(self, token: bytes) -> bool:
        return self._agent_token is not None and hmac.compare_digest(token, self._agent_token)


class _Renewal:
    """Renews the token files on a thread: a file system may make its readers wait. All waiting requests share one
    renewal, so a slow one occupies one thread. Used on one event loop."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = files
        self._look: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Waits at most two seconds: then the tokens stay as they were, and a later request may see the new ones."""
        if not self._files:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(run_in_threadpool(self._renew_all))
        await asyncio.wait([self._look], timeout=_MAX_LOOK_SECONDS)

    def _renew_all(self) -> None:
        for file in self._files:
            file.renew()


def _is_open(path: str) -> bool:
    return is_probe(path) or path == "/metrics"


def _is_cross_site(scope: Scope) -> bool:
    """Whether a browser sends this on behalf of another site: loopback does not keep such requests out, and the
    browser adds a client certificate by itself. Names that a site points at loopback are refused earlier
    (`AdmissionMiddleware`)."""
    headers = dict(scope["headers"])
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _unauthorized(scope: Scope, reading: bool, has_token: bool) -> Response:
    challenge = 'Bearer realm="kvstow"' + (', error="invalid_token"' if has_token else "")
    challenge += ', Basic realm="kvstow"' if reading else ""
    detail = "the token is not valid" if has_token else "this needs the header `Authorization: Bearer TOKEN`"
    return problem(scope, 401, detail, headers={"WWW-Authenticate": challenge})


def _token(scope: Scope, reading: bool) -> bytes | None:
    """The token of the request; None if it has none, or more than one Authorization header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, given = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    match scheme.lower():
        case b"bearer":
            return given.strip() or None
        case b"basic" if reading:
            return _password(given) or None
    return None


def _password(given: bytes) -> bytes:
    """Of `user:password` in base64; empty for what is none."""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
