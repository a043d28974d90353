"""Authentication: the callers of the Unix socket, bearer tokens and client certificates.

- Probes and metrics are open.
- Block keys need a credential: a viewer token, an admin token, a client certificate or the Unix socket. A key is a hash
  of a prompt. So anyone who reads keys can follow what others ask, and anyone who looks keys up can test a guess.
- Other reads are open unless viewer tokens are configured. Then they need one of these credentials, too.
- Changes need the Unix socket, an admin token or a client certificate. Everyone who can open the socket may make them:
  the server's user, root, and a group if the host has given the socket to one.
- The report of a rank always needs a credential: the agents' token, or an admin's. The agents' token allows only that.

The method and the path of a request decide which rule applies (`_shows_keys` names the paths). So a new route needs
code here only if it shows keys. Browsers send no bearer tokens, so reads also accept a token as the password of Basic
authentication. Changes do not, because a browser would add the password to requests from pages of other sites, too.

A browser sends requests for pages of any site to any address that it can reach. Such requests are refused. This
includes requests that only read, because the number of open streams is limited. Links to the status page still work.
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
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstow.attach.peer import overflow_uid
from kvstow.errors import ConfigError
from kvstow_api.answers import BLOCK_EVENTS
from kvstow_api.host import ApiHost
from kvstow_api.hostsettings import TokenFile
from kvstow_api.journal import LimitedLog
from kvstow_api.problems import problem

logger = logging.getLogger("kvstow.api")

ACTOR = "kvstow.actor"
"""The key of the actor in an ASGI scope: uid:UID, admin, certificate:SUBJECT, viewer, agent, or anonymous."""

_UNKNOWN = frozenset({None, "anonymous", "-"})

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

CERTIFICATE = "client_certificate"
"""The key of a client certificate's subject in the `state` of an ASGI scope. The TLS layer has verified it."""

CALLER = "caller_uid"
"""The key, in the `state` of an ASGI scope, of the uid of the process at the other end of the Unix socket."""

_READING_POST = "/v1/lookup"  # a POST, because a query has no room for a thousand keys
_PROBE_PATH = re.compile(r"/(livez|readyz|health|healthz|startupz)(/[^/]*)?")
_CERTIFICATE_ACTOR = "certificate:"
_CALLER_ACTOR = "uid:"
_MAX_RENEWAL_SECONDS = 2.0
_REPORT_PATH = re.compile(r"/v1/ranks/[^/]+/report")
_BLOCKS_PATH = re.compile(r"/v1/pools/[^/]+/blocks(/.*)?")
_EVENTS_PATH = "/v1/events"


def is_reading(method: str, path: str) -> bool:
    return method in READING_METHODS or (method == "POST" and path == _READING_POST)


def is_probe(path: str) -> bool:
    return _PROBE_PATH.fullmatch(path) is not None


def is_report(path: str) -> bool:
    """Whether this is the path of a rank's report."""
    return _REPORT_PATH.fullmatch(path) is not None


def is_stranger(scope: Scope) -> bool:
    """Whether the request neither has an admin's credential nor came through a Unix socket. Only those who may make
    changes can open that."""
    client = scope.get("client")
    return bool(client and client[0]) and not is_admin(scope.get(ACTOR, ""))


def is_admin(actor: str) -> bool:
    """Whether this actor of a scope may make every change."""
    return actor == "admin" or actor.startswith((_CERTIFICATE_ACTOR, _CALLER_ACTOR))


def is_known(actor: object) -> bool:
    """Whether this actor of a scope has shown a valid credential."""
    return actor not in _UNKNOWN


class Credentials(NamedTuple):
    """Credentials that the API accepts. With `certificates`, a verified client certificate counts as an admin token.
    `agent` is the token of the ranks' agents."""

    admins: TokenFile | None = None
    viewers: TokenFile | None = None
    agent: str | None = None
    certificates: bool = False

    @classmethod
    def of(cls, host: ApiHost) -> Credentials:
        """Make the credentials of a host. Raises `ConfigError` if a token file cannot be used."""
        found = cls(
            admins=None if host.token_file is None else TokenFile(host.token_file),
            viewers=None if host.viewer_token_file is None else TokenFile(host.viewer_token_file),
            agent=host.agent_token,
            certificates=host.client_certificates,
        )
        for setting, exposure in (found.exposures or {}).items():
            logger.warning("%s %s: %s", setting, getattr(host, setting), exposure)
        return found

    @property
    def guard_changes(self) -> bool:
        return self.admins is not None or self.certificates

    @property
    def exposures(self) -> Mapping[str, str] | None:
        """Describes the access that other users have to each token file, by setting. None if no file is set."""
        given = {name: file.exposure for name, file in self.files.items()}
        return {name: what for name, what in given.items() if what is not None} if given else None

    @property
    def problems(self) -> Mapping[str, str]:
        """Says why token files cannot be used now, by setting. It names no path, because every reader may see it."""
        return {name: file.problem for name, file in self.files.items() if file.problem is not None}

    @property
    def files(self) -> Mapping[str, TokenFile]:
        """The token files by setting."""
        files = {"token_file": self.admins, "viewer_token_file": self.viewers}
        return {name: file for name, file in files.items() if file is not None}

    def renew(self) -> None:
        """Read the token files that have changed. This may take any time, so call it on a thread."""
        for file in self.files.values():
            file.renew()

    def kind_of(self, token: bytes) -> str | None:
        """Return whose token it is, `admin` or `viewer`, or None if no file has it. Raises `ConfigError` if no usable
        file has it, and one file is unusable."""
        problem: ConfigError | None = None
        for kind, file in (("admin", self.admins), ("viewer", self.viewers)):
            try:
                if file is not None and file.accepts(token):
                    return kind
            except ConfigError as error:
                problem = error
        if problem is not None:
            raise problem
        return None


class AuthMiddleware:
    """Puts the actor of a request into its scope, or answers 401, 403, or 503 for an unusable token file."""

    def __init__(self, app: ASGIApp, *, credentials: Credentials, addresses: Sequence[str] = ()) -> None:
        """`addresses` are those at which the server listens. Refusals name the Unix socket among them."""
        self._app = app
        self._socket = next((address for address in addresses if address.startswith("unix:")), None)
        self._nobody = overflow_uid()
        self._credentials = credentials
        self._agent_token = credentials.agent.encode() if credentials.agent else None
        self._unusable = LimitedLog(logger)
        self._files = _Renewal(credentials)

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
        """Put the actor into the scope. Returns a response if the request is refused."""
        scope[ACTOR] = "anonymous"
        if _is_cross_site(scope) and not (reading and _is_navigation(scope)):
            detail = "web pages of other sites may not " + ("read this" if reading else "change anything")
            return problem(scope, 403, detail)
        shows_keys = reading and _shows_keys(scope)
        if reading and not shows_keys and (self._credentials.viewers is None or is_polled(scope["path"])):
            with suppress(ConfigError):  # the request needs no token, but one still identifies an admin
                scope[ACTOR] = self._actor(scope, token) or "anonymous"
            return None
        try:
            actor = self._actor(scope, token)
        except ConfigError as error:
            self._unusable.log(logging.ERROR, "a token file is not usable: %s", error)
            unusable = " and ".join(f"{name} ({why})" for name, why in self._credentials.problems.items())
            return problem(
                scope,
                503,
                f"this server cannot use its {unusable or 'token file'}, so it cannot tell whether the token is one of "
                "those in it: an operator has to mend the file",
            )
        scope[ACTOR] = actor or "-"
        if actor is None:
            return self._refusal(scope, reading, token is not None, shows_keys)
        return _beyond_rights(scope, reading, actor)

    def _actor(self, scope: Scope, token: bytes | None) -> str | None:
        """Return the actor of the request, or None if it has no valid credential. Raises `ConfigError` if a token file
        is unusable."""
        known = self._credentials
        certificate = scope.get("state", {}).get(CERTIFICATE) if known.certificates else None
        if certificate is not None:
            return f"{_CERTIFICATE_ACTOR}{certificate}"
        if token is not None and self._is_agent(token):
            return "agent"
        caller = scope.get("state", {}).get(CALLER)
        if caller is not None and caller != self._nobody and not is_report(scope["path"]):
            return f"{_CALLER_ACTOR}{caller}"
        return None if token is None else known.kind_of(token)

    def _refusal(self, scope: Scope, reading: bool, has_token: bool, shows_keys: bool) -> Response:
        """Return 401 if a token or a certificate would help, and otherwise 403. Both name the socket that needs
        none."""
        if is_report(scope["path"]):
            return _unauthorized(scope, reading, has_token, "")
        caller = scope.get("state", {}).get(CALLER)
        if caller is not None:
            way = (
                f"uid {caller} is the kernel's overflow uid, which stands for every user that this container does not "
                "map: make the request as a mapped user"
            )
        elif self._socket is not None:
            way = f"the server's user and root need none on its machine, through {self._socket}"
        else:
            way = "the server has no Unix socket; its log says why"
        if self._credentials.guard_changes or (reading and self._credentials.viewers is not None):
            return _unauthorized(scope, reading, has_token, f"; {way}")
        if caller is not None:
            return problem(scope, 403, way)
        if shows_keys:
            detail = "only callers with a credential may see block keys, and this server has no token"
        else:
            detail = "this server takes no changes over TCP, because it has no token for them"
        return problem(scope, 403, f"{detail}; {way}")

    def _is_agent(self, token: bytes) -> bool:
        return self._agent_token is not None and hmac.compare_digest(token, self._agent_token)


class _Renewal:
    """Renews the token files on a thread, because file systems can block. All waiting requests share one renewal, so a
    slow file system occupies only one thread. Used on one event loop."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._renewal: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Renew the tokens. Waits at most two seconds. If it takes longer, only later requests see the new tokens."""
        if not self._credentials.files:
            return
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(run_in_threadpool(self._credentials.renew))
        await asyncio.wait([self._renewal], timeout=_MAX_RENEWAL_SECONDS)


def _beyond_rights(scope: Scope, reading: bool, actor: str) -> Response | None:
    """Return the refusal of a request that this known actor may not make, or None if it may."""
    if actor == "agent" and not is_report(scope["path"]):
        return problem(scope, 403, "an agent's token allows only the report of a rank")
    if actor == "viewer" and not reading:
        return problem(scope, 403, "a viewer's token allows only reading")
    return None


def is_polled(path: str) -> bool:
    """Whether machines poll this path: a probe, or the metrics. These are open to everyone."""
    return is_probe(path) or path == "/metrics"


def _shows_keys(scope: Scope) -> bool:
    """Whether the answer to this reading request would contain block keys, or say which keys exist."""
    path = scope["path"]
    if path == _EVENTS_PATH:
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        return any(event in value for name, value in query if name == "types" for event in BLOCK_EVENTS)
    return path == _READING_POST or _BLOCKS_PATH.fullmatch(path) is not None


def _is_cross_site(scope: Scope) -> bool:
    """Whether a browser sends this request for a page of another site. Such requests can reach loopback addresses, and
    the browser adds client certificates to them. `AdmissionMiddleware` has already refused Host names that a site has
    pointed at loopback."""
    headers = dict(scope["headers"])
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _is_navigation(scope: Scope) -> bool:
    """Whether the browser shows the answer as a page of its own, as when a person follows a link. A page of another
    site cannot read it there. It could use an answer for a frame or a script."""
    headers = dict(scope["headers"])
    return headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"


def _unauthorized(scope: Scope, reading: bool, has_token: bool, way: str) -> Response:
    detail = "invalid token" if has_token else "a token is needed: `Authorization: Bearer TOKEN`"
    answer = problem(scope, 401, detail + way)
    # Each challenge has its own line, and Basic comes first: Chromium looks at a line's first one, and knows no Bearer.
    if reading:
        answer.headers.append("WWW-Authenticate", 'Basic realm="kvstow"')
    answer.headers.append(
        "WWW-Authenticate", 'Bearer realm="kvstow"' + (', error="invalid_token"' if has_token else "")
    )
    return answer


def _token(scope: Scope, reading: bool) -> bytes | None:
    """Return the token of the request. None if it has none, or more than one Authorization header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, given = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    match scheme.lower():
        case b"bearer":
            return given.strip() or None
        case b"basic" if reading:
            return _password(given) or None
    return None


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
