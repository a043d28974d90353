from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope
from tests.api.conftest import CALLER_UID, send_report

from kvstow_api.auth import CALLER

pytestmark = pytest.mark.anyio

EVICT = "/v1/pools/host/evict?wait=30"
LOOKUP = "/v1/lookup"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"slots": 1',
        b'{"slots": ' + b"9" * 10_000 + b"}",
        b"[" * 100_000,
    ],
)
async def test_invalid_json_is_malformed(client: httpx.AsyncClient, content: bytes) -> None:
    answer = await client.post(EVICT, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "malformed_body"


async def test_invalid_json_is_reported_with_its_position(client: httpx.AsyncClient) -> None:
    answer = await client.post(EVICT, content=b'{"slots" 1}', headers=JSON)
    assert answer.json()["detail"] == "the body is not JSON: Expecting ':' delimiter (at character 9)"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_another_content_type_is_refused(client: httpx.AsyncClient, content_type: str) -> None:
    answer = await client.post(EVICT, content=b'{"slots": 1}', headers={"Content-Type": content_type})
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported_media_type"
    assert answer.json()["detail"] == f"Content-Type is {content_type!r}; allowed: application/json"


async def test_a_charset_is_ignored(client: httpx.AsyncClient, ranks: Any) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (await client.post(EVICT, content=b'{"slots": 1}', headers=headers)).status_code == 200


async def test_an_absent_body_is_a_missing_field(client: httpx.AsyncClient) -> None:
    answer = await client.post(EVICT)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "body"
    assert error["allowed"] == "slots, bytes, idle_seconds, context, dry_run"
    assert (await send_report(client, b"")).status_code == 422


async def test_a_body_declared_too_large_is_not_read(client: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    answer = await client.post(EVICT, content=never(), headers={**JSON, "Content-Length": str((1 << 20) + 1)})
    assert answer.status_code == 413
    assert "1048576" in answer.json()["detail"]


async def test_a_body_without_a_length_is_refused_without_reading_it(client: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    answer = await client.post(EVICT, content=never(), headers=JSON)
    assert (answer.status_code, answer.headers["connection"]) == (411, "close")
    assert answer.json()["detail"] == "the request has a Transfer-Encoding; send its body with a Content-Length"


async def test_reads_of_viewers_have_a_lower_limit(launch: Any, token_file: Path, viewer_file: Path) -> None:
    files = {"token_file": token_file, "viewer_token_file": viewer_file}
    client: httpx.AsyncClient = await launch(caller=None, **files)
    content = b'{"keys": ["00aa"]}'.ljust(1 << 16)
    viewer = {**JSON, "Authorization": "Bearer viewer-token"}
    assert (await client.post(LOOKUP, content=content, headers=viewer)).status_code == 200
    answer = await client.post(LOOKUP, content=content + b" ", headers=viewer)
    assert answer.status_code == 413
    limits = "65536 bytes (limit for admins and the Unix socket: 1048576 bytes)"
    assert answer.json()["detail"] == f"the body is larger than {limits}"


def test_the_unix_socket_and_admins_have_the_higher_limit(
    serve: Any, tmp_path: Path, token_file: Path, viewer_file: Path
) -> None:
    uds = tmp_path / "admin.sock"
    url = serve(uds=uds, token_file=token_file, viewer_token_file=viewer_file).url
    content = b'{"keys": ["00aa"]}'.ljust(1 << 20)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as local:
        assert local.post(f"http://kvstow{LOOKUP}", content=content, headers=JSON).status_code == 200
    viewer = {**JSON, "Authorization": "Bearer viewer-token"}
    assert httpx.post(f"{url}{LOOKUP}", content=content, headers=viewer).status_code == 413
    admin = {**JSON, "Authorization": "Bearer admin-token"}
    assert httpx.post(f"{url}{LOOKUP}", content=content, headers=admin).status_code == 200


async def test_a_body_in_pieces_is_joined(client: httpx.AsyncClient, ranks: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"slo', b'ts"', b": 1}"):
            yield piece

    headers = {**JSON, "Content-Length": "12"}
    assert (await client.post(EVICT, content=pieces(), headers=headers)).status_code == 200


async def test_an_incomplete_body_does_not_reach_the_route(ranks: Any, launch: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:1])
    await launch()
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"slots": 1}', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": EVICT,
        "state": {CALLER: CALLER_UID},
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"100")],
    }
    await launch.app(scope, receive, send)
    assert not sent
    assert ranks.engine.lookup(keys[:1]) == 1
