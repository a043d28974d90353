"""Ambiguous framing, unknown host names, and HEAD."""

from __future__ import annotations

import re
import socket
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvstow.errors import ConfigError
from kvstow_api.hostsettings import parse_host_names
from kvstow_api.middleware import HeadMiddleware
from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio

_RAW_PATHS = [
    route.path  # type: ignore[attr-defined]
    for router in ROUTERS
    for route in router.routes
    if "GET" in route.methods  # type: ignore[attr-defined]
]
_PARAMETERS = {"{pool}": "host", "{check}": "loop", "{rank}": "0", "{context}": "00" * 16}
PATHS = sorted(re.sub(r"{.*?}", lambda found: _PARAMETERS.get(found[0], "00"), path) for path in _RAW_PATHS)


def ask(url: str, request: bytes) -> bytes:
    """What comes until the server hangs up."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20.0) as client:
        client.sendall(request)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    return answer


# -- names ------------------------------------------------------------------------------------------------------


OWN = [
    "localhost",
    "LOCALHOST:9595",
    "localhost.",
    "127.0.0.1:9595",
    "127.8.8.8",
    "[::1]",
    "[::1]:9595",
    "Ops.Example:1",
]
UNKNOWN = ["evil.example", "evil.example:9595", "localhost.evil.example", "10.0.0.1", "[::1", "", "127.0.0.1.evil"]


def test_a_server_on_loopback_accepts_its_own_names(serve: Any) -> None:
    listeners = serve(allowed_hosts=("ops.example",))
    with httpx.Client(base_url=listeners.url) as client:
        for host, path in product(OWN, ["/livez", "/v1/info"]):
            assert client.get(path, headers={"Host": host}).status_code == 200, (host, path)


def test_an_unknown_name_that_resolves_to_loopback_is_refused(serve: Any) -> None:
    listeners = serve(allowed_hosts=("ops.example",))
    allowed = "allowed: localhost, the address, ops.example. Add names with the setting allowed_hosts"
    with httpx.Client(base_url=listeners.url) as client:
        for host, path in product(UNKNOWN, ["/livez", "/v1/events", "/metrics", "/"]):
            answer = client.get(path, headers={"Host": host})
            assert (answer.status_code, answer.json()["code"]) == (421, "unknown_host"), (host, path)
            assert answer.json()["detail"].endswith(allowed), (host, path)


def test_other_addresses_and_unix_sockets_accept_any_name(serve: Any, tmp_path: Path) -> None:
    """Probes ask by the address of a pod; no browser comes through a Unix socket."""
    anywhere = serve(allowed_hosts=None)
    assert httpx.get(f"{anywhere.url}/livez", headers={"Host": "10.1.2.3:9595"}).status_code == 200
    uds = tmp_path / "admin.sock"
    serve(allowed_hosts=(), uds=uds)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as client:
        assert client.get("http://kvstow/livez").status_code == 200


def test_a_request_without_a_host_name_is_accepted(serve: Any) -> None:
    listeners = serve(allowed_hosts=())
    assert ask(listeners.url, b"GET /livez HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_host_names_are_parsed_from_a_list_or_text() -> None:
    assert parse_host_names("k", "a.example, B.example.") == ("a.example", "b.example")
    assert parse_host_names("k", ["a"]) == ("a",)
    for wrong in ("a:80", "http://a", ["a b"], [1], 1, "*"):
        with pytest.raises(ConfigError, match=r"k is .*; allowed: a list of host names without ports"):
            parse_host_names("k", wrong)


# -- framing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/pools/host/retry", "/v1/lookup", "/nowhere"])
def test_ambiguous_framing_is_refused_and_closes_the_connection(serve: Any, path: str) -> None:
    """What follows may be the end of a body for one reader, and a request for another."""
    smuggled = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {5 + len(smuggled)}\r\n".encode()
    answer = ask(serve().url, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"code": "length_required"' in answer


def test_a_chunked_body_is_refused_before_its_trailers_are_parsed(serve: Any) -> None:
    head = b"POST /v1/pools/host/retry HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = ask(serve().url, head + b"1\r\nx\r\n0\r\n" + b"x: y\r\n" * 300 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert b"connection: close\r\n" in answer.lower()


def test_a_read_with_a_body_is_refused(serve: Any) -> None:
    """The server would not read the body, which would then stand before the next request."""
    head = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    answer = ask(serve().url, head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"GET requests take no body" in answer


async def test_a_read_with_an_empty_body_is_accepted(client: httpx.AsyncClient, ranks: Any) -> None:
    assert (await client.get("/v1/info", headers={"Content-Length": "0"})).status_code == 200


# -- HEAD -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_head_is_answered_like_get_without_the_body(client: httpx.AsyncClient, ranks: Any, path: str) -> None:
    head = await client.head(path)
    assert head.content == b""
    if head.headers["content-type"].startswith("text/event-stream"):
        assert head.status_code == 200
        return
    get = await client.get(path)
    assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])
    assert get.status_code in (200, 404)


async def test_head_of_a_stream_ends_after_the_headers() -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == "GET"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        pytest.fail("the stream goes on")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(HeadMiddleware(endless))) as client:
        answer = await client.head("http://kvstow/")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_head_of_a_stream_takes_no_place(client: httpx.AsyncClient, ranks: Any) -> None:
    for _ in range(100):
        assert (await client.head("/v1/events")).status_code == 200


def test_head_over_a_socket_keeps_the_connection_usable(serve: Any) -> None:
    with httpx.Client(base_url=serve().url) as client:
        for path in ("/metrics", "/v1/info", "/", "/v1/events", "/livez"):
            assert client.head(path).status_code == 200, path
        assert client.get("/v1/info").status_code == 200


async def test_head_of_a_route_without_get_is_405(client: httpx.AsyncClient) -> None:
    assert (await client.head("/v1/pools/host/retry")).status_code == 405


async def test_head_is_counted_by_its_route(client: httpx.AsyncClient, ranks: Any) -> None:
    await client.head("/v1/pools/host")
    metrics = (await client.get("/metrics")).text
    (line,) = (
        line
        for line in metrics.splitlines()
        if line.startswith("kvstow_http_requests_total{") and 'method="HEAD"' in line
    )
    assert 'route="/v1/pools/{pool}"' in line


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_method_that_is_not_allowed_comes_before_a_body_that_is_not(
    client: httpx.AsyncClient, method: str
) -> None:
    refused = await client.request(method, "/v1/pools/host/evict", content=b"{}")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (await client.request(method, "/v1/drain", content=b"{}")).status_code == 400
