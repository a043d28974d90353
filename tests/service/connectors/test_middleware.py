"""The middleware for vLLM's API server: what it adds to a request's body, and what it passes on as it came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstow_service.connectors.middleware import MOST_BYTES, HintsInBodies, Message, with_hints
from kvstow_service.connectors.otherwords import WORDS

pytestmark = pytest.mark.anyio

CHAT, URL = "/v1/chat/completions", "http://vllm"


async def received(request: Request) -> Response:
    """The body as it has arrived, in which length its headers said, and whether more comes after it."""
    body = await request.body()
    length = request.headers.get("content-length")
    return JSONResponse({"body": body.decode("latin-1"), "length": length, "gone": await request.is_disconnected()})


APP = Starlette(
    routes=[Route("/{path:path}", received, methods=["POST", "PUT"])], middleware=[Middleware(HintsInBodies)]
)


async def sent(content: bytes | AsyncIterator[bytes], path: str = CHAT, method: str = "POST", **headers: str) -> Any:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url=URL) as client:
        answer = await client.request(method, path, content=content, headers=headers)
        assert answer.status_code == 200
        return answer.json()


async def arrives(body: Any, path: str = CHAT, **headers: str) -> Any:
    """What the server makes of a body that is sent as JSON."""
    found = await sent(json.dumps(body).encode(), path, **headers)
    assert int(found["length"]) == len(found["body"])
    return json.loads(found["body"])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/behind/a/proxy" + CHAT])
async def test_hints_are_added_to_the_transfer_parameters(path: str) -> None:
    body = {"model": "m", "prompt_cache_key": "trip", "prompt_cache_retention": "24h", "messages": [{"x": "ä"}]}
    hints = {"context": "trip", "keep_for": 86_400.0}
    assert await arrives(body, path) == {**body, "kv_transfer_params": {"kvstow": hints}}


async def test_what_the_client_says_to_kvstow_itself_counts_more() -> None:
    params = {"do_remote_decode": True, "kvstow": {"context": "own", "resume_in": 5}}
    body = {"retention_scope": "scope", "cache_control": {"ttl": "1h"}, "kv_transfer_params": params}
    found = await arrives(body)
    assert found["kv_transfer_params"] == {
        "do_remote_decode": True,
        "kvstow": {"context": "own", "resume_in": 5, "keep_for": 3600.0},
    }
    assert (await arrives({**body, "kv_transfer_params": None}))["kv_transfer_params"]["kvstow"]["context"] == "scope"


async def test_a_session_of_vllm_counts_more_than_another_name() -> None:
    body = {"prompt_cache_key": "key"}
    assert await arrives({**body, "session_id": "s"}) == {**body, "session_id": "s"}
    assert await arrives(body, **{"X-Session-ID": "s"}) == body
    timed = await arrives({**body, "cache_control": {"ttl": "1h"}}, **{"X-Session-ID": "s"})
    assert timed["kv_transfer_params"] == {"kvstow": {"keep_for": 3600.0}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"not JSON",
        b'{"prompt_cache_key": "trip"',
        b'["prompt_cache_key"]',
        b'"prompt_cache_key"',
        b'{"prompt_cache_key": "trip", "kv_transfer_params": 7}',
        b'{"prompt_cache_key": "trip", "kv_transfer_params": {"kvstow": 7}}',
        b'{"prompt": "\\"prompt_cache_key\\" is a word"}',
        b'{"prompt_cache_key": null}',
        b'{"nvext": {"agent_hints": {"osl": 7}}}',
        b'{"nvext": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'\xff{"prompt_cache_key": "trip"}',
        '{"prompt_cache_key": "trip"}'.encode("utf-16"),
        b'{"cache_control": {"ttl": ' + b"9" * 5000 + b"}}",
    ],
)
async def test_other_bodies_arrive_as_they_came(body: bytes) -> None:
    found = await sent(body)
    assert found["body"].encode("latin-1") == body


async def test_other_paths_and_methods_are_not_read() -> None:
    body = b'{"prompt_cache_key": "trip"}'
    assert (await sent(body, "/v1/embeddings"))["body"].encode() == body
    assert (await sent(body, method="PUT"))["body"].encode() == body


async def test_a_bad_word_is_passed_on_as_such() -> None:
    found = await arrives({"nvext": 7, "prompt_cache_key": ["trip"]})
    assert found["kv_transfer_params"] == {"kvstow": {"invalid": True, "context": ["trip"]}}


async def test_a_body_in_pieces() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"prompt_cache', b"", b'_key": "tr', b'ip"}', b"  \n"):
            yield piece

    found = await sent(pieces())
    assert json.loads(found["body"])["kv_transfer_params"] == {"kvstow": {"context": "trip"}}
    assert found["length"] is None


async def test_the_bytes_before_the_added_field_are_the_clients() -> None:
    body = b'{"prompt_cache_key":"trip", "temperature":1.10, "seed":12345678901234567890, "x":"\\ud800"} '
    found = (await sent(body))["body"].encode("latin-1")
    assert found == body[:-2] + b',"kv_transfer_params":{"kvstow": {"context": "trip"}}}'


async def test_a_body_that_is_too_long_is_passed_on_while_it_comes() -> None:
    size = MOST_BYTES // 4
    read, given, given_before = 0, 0, 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal given
        yield b'{"prompt_cache_key": "trip", "prompt": "'
        for _ in range(6):
            given += 1
            yield b"x" * size
        yield b'"}'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal read, given_before
        given_before = given
        is_more = True
        while is_more:
            message = await receive()
            read += len(message["body"])
            is_more = message["more_body"]
        await Response(str(read))(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(HintsInBodies(app)), base_url=URL) as client:
        answer = await client.post(CHAT, content=pieces())
    assert given_before == 4, "the server began to read before the end"
    assert int(answer.text) == 6 * size + len(b'{"prompt_cache_key": "trip", "prompt": "' + b'"}')


async def test_a_client_that_goes_while_it_sends() -> None:
    incoming: list[Message] = [
        {"type": "http.request", "body": b'{"prompt_cache_key": "tr', "more_body": True},
        {"type": "http.disconnect"},
        {"type": "http.disconnect"},
    ]
    expected, seen = list(incoming), list[Message]()

    async def receive() -> Message:
        return incoming.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive() for _ in range(3)])

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await HintsInBodies(app)(scope, receive, lambda message: None)  # type: ignore[arg-type, return-value]
    assert seen == expected


async def test_what_is_no_request_is_passed_on() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    for kind in ("lifespan", "websocket"):
        await HintsInBodies(app)({"type": kind, "path": CHAT}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


JSON = st.recursive(
    st.sampled_from([None, True, 0, -1.5, 10**400, "", "1h", "\ud800", '"', "}"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["ttl", "kvstow", "}"]), inner),
    max_leaves=6,
)


@given(fields=st.dictionaries(st.sampled_from([*WORDS, "kv_transfer_params", "session_id", "model"]), JSON))
def test_any_body_stays_the_clients_but_for_the_transfer_parameters(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    found = json.loads(with_hints(body))
    assert {**found, "kv_transfer_params": None} == {**fields, "kv_transfer_params": None}
