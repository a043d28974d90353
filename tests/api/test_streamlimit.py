"""Limits on open streams: simultaneous requests, single clients, and admins."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kvstow.errors import QueueFullError
from kvstow_api.auth import ACTOR
from kvstow_api.streams import MAX_STREAMS, RESERVED_STREAMS, STREAMS_PER_CLIENT, LimitedStream, StreamLimit

pytestmark = pytest.mark.anyio

PATH = "/v1/events"


class Streams:
    """Requests for streams of one application, which stay open until `close`."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, count: int = 1, *, client: str = "10.0.0.1", token: str = "") -> list[Any]:
        """The status of each of `count` simultaneous requests; those of refusals with their bodies."""
        answers = [asyncio.get_running_loop().create_future() for _ in range(count)]
        for answer in answers:
            headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
            scope = {
                "type": "http", "method": "GET", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
                "headers": headers, "client": (client, 1), "server": ("kvstow", 80), "scheme": "http",
                "http_version": "1.1", "root_path": "", "asgi": {"version": "3.0", "spec_version": "2.4"},
            }  # fmt: skip
            self._tasks.append(asyncio.create_task(self._app(scope, self.never, _noting(answer))))
        async with asyncio.timeout(60):
            return await asyncio.gather(*answers)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    @staticmethod
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError


def _noting(answer: asyncio.Future[Any]) -> Any:
    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body" and not answer.done():
            answer.set_result(status if status == 200 else (status, json.loads(message["body"])["detail"]))

    return send


@pytest.fixture
async def streams(launch: Any, ranks: Any, token_file: Path) -> AsyncIterator[Streams]:
    await launch(token_file=token_file)
    streams = Streams(launch.app)
    yield streams
    await streams.close()


async def test_the_bound_holds_for_simultaneous_requests(streams: Streams) -> None:
    answers = [
        answer
        for opened in await asyncio.gather(*(streams.open(5, client=f"10.0.{n}.1") for n in range(60)))
        for answer in opened
    ]
    assert answers.count(200) == MAX_STREAMS - RESERVED_STREAMS
    (refusal,) = set(answers) - {200}
    assert refusal[0] == 503
    assert refusal[1].endswith("and so may callers of the Unix socket")


async def test_one_client_cannot_take_all_places(streams: Streams) -> None:
    answers = await streams.open(300)
    assert answers.count(200) == STREAMS_PER_CLIENT
    assert next(a for a in answers if a != 200)[1].startswith("10.0.0.1 has ")
    assert await streams.open(client="10.0.0.2") == [200]


async def test_admins_have_reserved_places(streams: Streams) -> None:
    for number in range(MAX_STREAMS):
        await streams.open(client=f"10.0.0.{number}")
    assert Counter(await streams.open(RESERVED_STREAMS, token="admin-token")) == {200: RESERVED_STREAMS}
    ((status, detail),) = await streams.open(token="admin-token")
    assert (status, "are open, and no more are allowed" in detail) == (503, True)


async def test_an_invalid_token_gets_no_reserved_place(streams: Streams) -> None:
    answers = await streams.open(1000, token="wrong")
    assert answers.count(200) == STREAMS_PER_CLIENT


async def test_a_disconnect_frees_a_place(streams: Streams) -> None:
    for _ in range(3):
        assert (await streams.open(40)).count(200) == STREAMS_PER_CLIENT
        await streams.close()


async def test_a_response_that_is_not_sent_takes_no_place() -> None:
    limit = StreamLimit("streams", most=1, reserved=0, per_client=1)

    async def content() -> AsyncIterator[bytes]:
        yield b""

    answers = [LimitedStream(content(), limit) for _ in range(3)]
    assert limit.open == 0

    async def gone(_: Message) -> None:
        raise OSError

    for answer in answers:
        with pytest.raises(ClientDisconnect):
            await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, Streams.never, gone)
    assert limit.open == 0


@pytest.mark.parametrize(
    "trusted", [{"client": None}, {"client": ("", 0)}, {"client": ("x", 1), ACTOR: "certificate:a"}]
)
def test_the_unix_socket_and_admins_may_use_reserved_places(trusted: dict[str, Any]) -> None:
    limit = StreamLimit("streams", most=3, reserved=1, per_client=2)
    with ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(limit.place({"client": ("10.0.0.1", 1)}))
        with pytest.raises(QueueFullError, match=r"10\.0\.0\.1 has 2 open streams"):
            opened.enter_context(limit.place({"client": ("10.0.0.1", 2)}))
        with pytest.raises(QueueFullError, match="and so may callers of the Unix socket"):
            opened.enter_context(limit.place({"client": ("10.0.0.2", 1)}))
        opened.enter_context(limit.place(trusted))
        with pytest.raises(QueueFullError, match="3 streams are open, and no more are allowed"):
            opened.enter_context(limit.place(trusted))
    assert limit.open == 0


def test_forwarded_headers_do_not_change_the_client(serve: Any, ranks: Any) -> None:
    listeners = serve()
    answers = []
    with ExitStack() as opened:
        for number in range(STREAMS_PER_CLIENT + 1):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", listeners.port), timeout=20))
            head = f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Forwarded-For: 10.0.0.{number}\r\n\r\n"
            client.sendall(head.encode())
            answers.append(client.recv(1 << 16))
    assert [answer.split()[1] for answer in answers] == [b"200"] * STREAMS_PER_CLIENT + [b"503"]
    assert b"\r\nretry-after: 1\r\n" in answers[-1].lower()
