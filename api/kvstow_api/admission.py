"""Refuses ambiguous request framing, and Host names that are not the server's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstow_api.auth import READING_METHODS
from kvstow_api.hostsettings import is_loopback, normal_host
from kvstow_api.problems import method_not_allowed, problem

_PORT = re.compile(r":\d+$")
_CLOSE = {"Connection": "close"}


class AdmissionMiddleware:
    """Answers 400 to ambiguous framing and closes the connection; answers 421 to an unknown Host name.

    `allowed_hosts`: Host names, besides those of loopback, that a server on loopback accepts over TCP. A web page can
    point a name of its own at loopback (DNS rebinding) and would then read what is open to this machine. None allows
    any name, for servers on other addresses, where probes use the address of a pod.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Sequence[str] | None) -> None:
        self._app = app
        self._allowed = None if allowed_hosts is None else frozenset(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._judge(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _judge(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        chunked, length = b"transfer-encoding" in headers, headers.get(b"content-length")
        if chunked and length is not None:
            detail = "the request has both Content-Length and Transfer-Encoding"  # a proxy might obey the other one
            return problem(scope, 400, detail, code="malformed_request", headers=_CLOSE)
        if scope["method"] in READING_METHODS and (chunked or length not in (None, b"0")):
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
    """A Unix socket has no port, and browsers cannot reach it."""
    server = scope.get("server")
    return server is not None and server[1] is not None
