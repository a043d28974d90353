from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstow.testing.fakes import FakeClock
from kvstow_api.auth import ACTOR
from kvstow_api.idempotency import KEPT_SECONDS, MAX_BYTES, MAX_KEYS, IdempotencyMiddleware

pytestmark = pytest.mark.anyio

RETRY = "/v1/pools/host/retry"
EVICT = "/v1/pools/host/evict"


def key(text: str) -> dict[str, str]:
    return {"Idempotency-Key": text}


async def test_a_request_sent_again_is_answered_again_and_not_done_twice(client: httpx.AsyncClient, ranks: Any) -> None:
    first = await client.post(RETRY, headers=key("a"))
    again = await client.post(RETRY, headers=key("a"))
    assert (again.status_code, again.json()) == (first.status_code, first.json()) == (202, first.json())
    assert ranks.engine.desired().pin_attempt == 1
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert again.headers["content-type"] == "application/json"


async def test_other_keys_and_none_are_other_requests(client: httpx.AsyncClient, ranks: Any) -> None:
    for headers in (key("a"), key("b"), {}, {}):
        await client.post(RETRY, headers=headers)
    assert ranks.engine.desired().pin_attempt == 4


async def test_a_key_with_another_request_is_refused(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:4])
    await client.post(EVICT, json={"slots": 1}, headers=key("a"))
    others = [
        client.post(EVICT, json={"slots": 2}, headers=key("a")),
        client.post(f"{EVICT}?wait=1", json={"slots": 1}, headers=key("a")),
        client.post(RETRY, headers=key("a")),
    ]
    for answer in [await other for other in others]:
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert ranks.engine.contains(keys[:4]).count(True) == 3


async def test_a_refused_request_may_be_mended_and_sent_with_its_key(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:4])
    refused = await client.post(EVICT, json={"slots": 0}, headers=key("a"))
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    for _ in range(2):
        mended = await client.post(EVICT, json={"slots": 1}, headers=key("a"))
        assert (mended.status_code, mended.json()["evicted_slots"]) == (200, 1)
    assert ranks.engine.contains(keys[:4]).count(True) == 3


@pytest.mark.parametrize("given", ["", "a b", "x" * 256, "\u00e9"])
async def test_a_bad_key_is_refused(client: httpx.AsyncClient, engine: Any, given: str) -> None:
    answer = await client.post(RETRY, headers=[(b"Idempotency-Key", given.encode())])
    assert answer.status_code == 422
    assert "Idempotency-Key" in answer.json()["detail"]
    assert engine.desired().pin_attempt == 0


async def test_two_keys_are_refused(client: httpx.AsyncClient) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "a")]
    assert (await client.post(RETRY, headers=headers)).status_code == 422


async def test_a_key_does_not_open_what_a_token_guards(launch: Any, tmp_path: Any, ranks: Any) -> None:
    path = tmp_path / "token"
    path.write_text("admin")
    client = await launch(token_file=path)
    admin = {**key("a"), "Authorization": "Bearer admin"}
    assert (await client.post(RETRY, headers=admin)).status_code == 202
    assert (await client.post(RETRY, headers=key("a"))).status_code == 401


async def test_requests_that_only_read_ignore_keys(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    ranks.store(keys[:1])
    for wanted, found in ((keys[0], True), (keys[1], False)):
        answer = await client.post("/v1/lookup", json={"keys": [wanted.hex()]}, headers=key("a"))
        assert (answer.status_code, answer.json()["present"]) == (200, [found])
        assert "idempotency-replayed" not in answer.headers
    assert (await client.post(RETRY, headers=key("a"))).status_code == 202


async def test_anonymous_readers_do_not_push_out_an_admins_key(launch: Any, tmp_path: Any, ranks: Any) -> None:
    path = tmp_path / "token"
    path.write_text("admin")
    client: httpx.AsyncClient = await launch(token_file=path)
    admin = {**key("a"), "Authorization": "Bearer admin"}
    assert (await client.post(RETRY, headers=admin)).status_code == 202
    for number in range(MAX_KEYS + 5):
        await client.post("/v1/lookup", json={"keys": ["00aa"]}, headers=key(str(number)))
    again = await client.post(RETRY, headers=admin)
    assert again.headers.get("idempotency-replayed") == "true"
    assert ranks.engine.desired().pin_attempt == 1


async def test_other_methods_do_not_use_it(client: httpx.AsyncClient, ranks: Any) -> None:
    for mode in ("all", "stop_stores"):
        answer = await client.put("/v1/drain", json={"mode": mode}, headers=key("a"))
        assert answer.json()["mode"] == mode


class Backend:
    """An application whose answers the test decides."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Callable[[], Response] = lambda: Response(b"done")
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        assert (await receive())["body"].lower() == b"body"
        self.entered.set()
        await self.go.wait()
        await self.answer()(scope, receive, send)


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def caller(backend: Backend, clock: FakeClock) -> httpx.AsyncClient:
    keeping = IdempotencyMiddleware(backend, clock=clock)

    async def with_actor(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ACTOR] = dict(scope["headers"])[b"x-actor"].decode()
        await keeping(scope, receive, send)

    transport = httpx.ASGITransport(with_actor, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://kvstow")


async def post(
    caller: httpx.AsyncClient, name: str, *, actor: str = "admin", content: bytes = b"body"
) -> httpx.Response:
    return await caller.post("/", content=content, headers={**key(name), "X-Actor": actor})


async def test_while_the_first_is_under_way_the_second_is_a_conflict(
    caller: httpx.AsyncClient, backend: Backend
) -> None:
    backend.go.clear()
    first = asyncio.create_task(post(caller, "a"))
    await backend.entered.wait()
    second = await post(caller, "a")
    assert (second.status_code, second.json()["code"], second.headers["retry-after"]) == (
        409,
        "request_in_progress",
        "1",
    )
    backend.go.set()
    assert (await first).content == (await post(caller, "a")).content == b"done"
    assert backend.calls == 1


@pytest.mark.parametrize("failure", [409, 503, RuntimeError()])
async def test_what_failed_may_be_tried_again(
    caller: httpx.AsyncClient, backend: Backend, failure: int | Exception
) -> None:
    def fail() -> Response:
        if isinstance(failure, Exception):
            raise failure
        return Response(status_code=failure)

    backend.answer = fail
    assert (await post(caller, "a")).status_code in (409, 500, 503)
    backend.answer = lambda: Response(b"better")
    assert (await post(caller, "a")).content == b"better"


async def test_keys_are_forgotten_after_an_hour(caller: httpx.AsyncClient, backend: Backend, clock: FakeClock) -> None:
    await post(caller, "a")
    clock.advance(KEPT_SECONDS)
    await post(caller, "a")
    assert backend.calls == 1
    clock.advance(1.0)
    await post(caller, "a")
    assert backend.calls == 2


async def test_a_key_belongs_to_the_actor_who_sent_it(caller: httpx.AsyncClient, backend: Backend) -> None:
    backend.go.clear()
    first = asyncio.create_task(post(caller, "a"))
    await backend.entered.wait()
    backend.entered.clear()
    other = asyncio.create_task(post(caller, "a", actor="certificate:ops", content=b"BODY"))
    await asyncio.wait_for(backend.entered.wait(), 20)  # no conflict while the admin's is under way
    backend.go.set()
    assert [(await task).status_code for task in (first, other)] == [200, 200]
    assert (await post(caller, "a", content=b"body")).headers["idempotency-replayed"] == "true"
    assert (await post(caller, "a", actor="certificate:ops", content=b"body")).status_code == 422
    assert backend.calls == 2


async def test_an_actor_pushes_out_only_its_own_keys(caller: httpx.AsyncClient, backend: Backend) -> None:
    await post(caller, "a")
    for number in range(MAX_KEYS + 5):
        await post(caller, str(number), actor="agent")
    backend.answer = lambda: Response(bytes(MAX_BYTES + 1))
    await post(caller, "large", actor="agent")
    calls = backend.calls
    assert (await post(caller, "a")).headers["idempotency-replayed"] == "true"
    assert backend.calls == calls


async def test_only_so_many_keys_are_kept(caller: httpx.AsyncClient, backend: Backend) -> None:
    for number in range(MAX_KEYS + 1):
        await post(caller, str(number))
    await post(caller, str(MAX_KEYS))
    assert backend.calls == MAX_KEYS + 1
    await post(caller, "0")
    assert backend.calls == MAX_KEYS + 2


async def test_only_so_many_bytes_are_kept(caller: httpx.AsyncClient, backend: Backend) -> None:
    backend.answer = lambda: Response(bytes(3 << 20))
    await post(caller, "a")
    await post(caller, "b")
    await post(caller, "b")
    assert backend.calls == 2
    await post(caller, "a")
    assert backend.calls == 3
