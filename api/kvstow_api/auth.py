"""Who may change things: bearer tokens.

Reading is open. Every other method needs the token of the token file when one is configured; a new route
is covered without doing anything. The agent token opens the route by which a rank reports, nothing else.
"""

from __future__ import annotations

import hmac
import logging
import re

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstow.errors import ConfigError
from kvstow_api.problems import problem
from kvstow_api.tokens import TokenFile

logger = logging.getLogger("kvstow.api")

ACTOR = "kvstow.actor"
"""Key in an ASGI scope of who asks: admin, agent, or anonymous."""

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_REPORT_PATH = re.compile(r"/v1/ranks/[^/]+/report")


class AuthMiddleware:
    """Lets a request through with its actor in the scope, or answers 401, 403 or 503 (token file unusable)."""

    def __init__(self, app: ASGIApp, *, token_file: TokenFile | None, agent_token: str | None) -> None:
        self._app = app
        self._token_file = token_file
        self._agent_token = agent_token.encode() if agent_token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING_METHODS:
            await self._app(scope, receive, send)
            return
        refusal = self._judge(scope, _bearer(scope))
        await (refusal or self._app)(scope, receive, send)

    def _judge(self, scope: Scope, given: bytes | None) -> Response | None:
        """Put the actor into the scope, or say why the request is refused."""
        if self._agent_token and given and hmac.compare_digest(given, self._agent_token):
            scope[ACTOR] = "agent"
            if _REPORT_PATH.fullmatch(scope["path"]):
                return None
            return problem(scope, 403, "an agent's token opens only the report route")
        if self._token_file is None:
            if _is_cross_site(scope):
                return problem(scope, 403, "without a token, web pages of other sites may change nothing")
            scope[ACTOR] = "anonymous"
            return None
        try:
            accepted = given is not None and self._token_file.accepts(given)
        except ConfigError as error:
            logger.error("every change is refused: %s", error)
            return problem(scope, 503, "the token file cannot be used; the log says why", headers={"Retry-After": "5"})
        if not accepted:
            return _unauthorized(scope, given is not None)
        scope[ACTOR] = "admin"
        return None


def _is_cross_site(scope: Scope) -> bool:
    """Whether a browser sends this on behalf of another site: loopback does not keep such requests out."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _unauthorized(scope: Scope, has_token: bool) -> Response:
    challenge = 'Bearer realm="kvstow"' + (', error="invalid_token"' if has_token else "")
    detail = "the token is not valid" if has_token else "this needs the header `Authorization: Bearer TOKEN`"
    return problem(scope, 401, detail, headers={"WWW-Authenticate": challenge})


def _bearer(scope: Scope) -> bytes | None:
    """The bearer token of the request; None if it has none, or more than one Authorization header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return token.strip() or None if scheme.lower() == b"bearer" else None
