"""Two ways to send the same calls: `Client` blocks, `AsyncClient` is awaited."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvstow_api.client.call import ApiError, Call, Reply
from kvstow_api.client.decoding import decode
from kvstow_api.client.endpoint import DEFAULT_SERVER, Endpoint
from kvstow_api.client.eventstream import EventParser, Subscription
from kvstow_api.views.events import EventView
from kvstow_api.views.problems import ProblemView

T = TypeVar("T")

TIMEOUT_SECONDS = 10.0
_STREAM_SILENCE_SECONDS = 45.0  # the server sends at least a comment every 15 s


class Client:
    """Sends calls one at a time, over persistent connections. Not thread-safe; close it with `close` or `with`.

    `timeout` is in seconds, for connecting and for each answer; a call's `patience` is added to it. All failures raise
    `ApiError`.
    """

    def __init__(self, server: str | Endpoint = DEFAULT_SERVER, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._endpoint = Endpoint.parse(server) if isinstance(server, str) else server
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=self._endpoint.url,
            transport=httpx.HTTPTransport(uds=_path(self._endpoint), **_verify(self._endpoint)),
            timeout=timeout,
        )

    def send(self, call: Call[T]) -> T:
        with _as_api_errors(self._endpoint):
            answer = self._http.request(**_request(call, self._endpoint, self._timeout))
            return _decode(call, answer, self._endpoint)

    def events(self, subscription: Subscription) -> Iterator[EventView]:
        """Yields events as they arrive. Returns when the server ends the stream, raises when the connection breaks."""
        parser = EventParser()
        with (
            _as_api_errors(self._endpoint),
            self._http.stream("GET", **_stream(subscription, self._endpoint, self._timeout)) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                raise _failure(answer, self._endpoint)
            for line in answer.iter_lines():
                if (event := parser.feed(line)) is not None:
                    yield event

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """As `Client`, but async; several calls may be in flight. `transport` is for tests."""

    def __init__(
        self,
        server: str | Endpoint = DEFAULT_SERVER,
        *,
        timeout: float = TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint = Endpoint.parse(server) if isinstance(server, str) else server
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=self._endpoint.url,
            transport=transport or httpx.AsyncHTTPTransport(uds=_path(self._endpoint), **_verify(self._endpoint)),
            timeout=timeout,
        )

    async def send(self, call: Call[T]) -> T:
        with _as_api_errors(self._endpoint):
            answer = await self._http.request(**_request(call, self._endpoint, self._timeout))
            return _decode(call, answer, self._endpoint)

    async def events(self, subscription: Subscription) -> AsyncIterator[EventView]:
        """As `Client.events`."""
        parser = EventParser()
        with _as_api_errors(self._endpoint):
            async with self._http.stream("GET", **_stream(subscription, self._endpoint, self._timeout)) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _failure(answer, self._endpoint)
                async for line in answer.aiter_lines():
                    if (event := parser.feed(line)) is not None:
                        yield event

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _path(endpoint: Endpoint) -> str | None:
    return None if endpoint.uds is None else str(endpoint.uds)


def _verify(endpoint: Endpoint) -> dict[str, Any]:
    """Without TLS the system's certificates are not loaded, which takes 30 ms."""
    if endpoint.tls is not None:
        return {"verify": endpoint.tls}
    return {} if endpoint.url.startswith("https:") else {"verify": False}


def _request(call: Call[Any], endpoint: Endpoint, timeout: float) -> dict[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params,
        "json": call.body,
        "headers": {**endpoint.credentials(), **call.headers},
        "timeout": httpx.Timeout(timeout, read=timeout + call.patience),
    }


def _stream(subscription: Subscription, endpoint: Endpoint, timeout: float) -> dict[str, Any]:
    return {
        "url": subscription.path,
        "params": subscription.params,
        "headers": {**endpoint.credentials(), **subscription.headers},
        "timeout": httpx.Timeout(timeout, read=_STREAM_SILENCE_SECONDS),
    }


def _decode(call: Call[T], answer: httpx.Response, endpoint: Endpoint) -> T:
    if answer.status_code >= 400 and answer.status_code not in call.accepts:
        raise _failure(answer, endpoint)
    try:
        return call.decode(Reply(answer.status_code, answer.content))
    except (ValueError, TypeError, KeyError) as error:
        request = f"{call.method} {call.path}"
        message = f"{_not_kvstow(endpoint)}, or is another version: unexpected answer to {request}: {error}"
        raise ApiError(message) from error


def _failure(answer: httpx.Response, endpoint: Endpoint) -> ApiError:
    try:
        problem = decode(ProblemView, json.loads(answer.content))
    except (ValueError, TypeError):
        status = answer.status_code
        return ApiError(
            f"{_not_kvstow(endpoint)}: it answers with status {status} and no problem of KVStow", status=status
        )
    return ApiError(f"{problem.title}: {problem.detail}", problem)


def _not_kvstow(endpoint: Endpoint) -> str:
    return f"{_where(endpoint)} does not seem to be KVStow"


def _where(endpoint: Endpoint) -> str:
    return f"unix:{endpoint.uds}" if endpoint.uds else endpoint.url


@contextmanager
def _as_api_errors(endpoint: Endpoint) -> Iterator[None]:
    """Turns errors of httpx into `ApiError`s that name the server."""
    where = _where(endpoint)
    try:
        yield
    except httpx.TimeoutException as error:
        raise ApiError(f"{where} did not answer in time") from error
    except httpx.HTTPError as error:
        raise ApiError(f"{where} cannot be reached: {error}") from error
