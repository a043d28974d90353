"""Sends calls, and yields events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvstow_api.answers import EventView, ProblemView
from kvstow_api.client.call import ApiError, Call, Reply
from kvstow_api.client.decoding import decode
from kvstow_api.client.endpoint import DEFAULT_SERVER, Endpoint
from kvstow_api.client.eventstream import EventParser, Subscription

T = TypeVar("T")

_STREAM_SILENCE_SECONDS = 45.0  # the server sends at least a comment every 15 s


class Client:
    """Sends calls one at a time, over persistent connections. Not thread-safe; close it with `close` or `with`.

    `timeout` is in seconds, for connecting and for each answer; a call's `patience` is added to it. All failures raise
    `ApiError`.
    """

    def __init__(self, server: str | Endpoint = DEFAULT_SERVER, *, timeout: float = 10.0) -> None:
        self._endpoint = endpoint = Endpoint.parse(server) if isinstance(server, str) else server
        self._timeout = timeout
        uds = None if endpoint.uds is None else str(endpoint.uds)
        transport = httpx.HTTPTransport(uds=uds, **_verify(endpoint))
        self._http = httpx.Client(base_url=endpoint.url, transport=transport)

    def send(self, call: Call[T]) -> T:
        with self._as_api_errors():
            answer = self._http.request(
                call.method,
                call.path,
                params=call.params,
                json=call.body,
                headers={**self._endpoint.credentials(), **call.headers},
                timeout=httpx.Timeout(self._timeout, read=self._timeout + call.patience),
            )
        if answer.status_code >= 400 and answer.status_code not in call.accepts:
            raise self._failure(answer)
        try:
            return call.decode(Reply(answer.status_code, answer.content))
        except (ValueError, TypeError, KeyError) as error:
            request = f"{call.method} {call.path}"
            message = f"{self._not_kvstow()}, or is another version: unexpected answer to {request}: {error}"
            raise ApiError(message) from error

    def events(self, subscription: Subscription) -> Iterator[EventView]:
        """Yields events as they arrive. Returns when the server ends the stream, raises when the connection breaks."""
        parser = EventParser()
        with (
            self._as_api_errors(),
            self._http.stream(
                "GET",
                subscription.path,
                params=subscription.params,
                headers={**self._endpoint.credentials(), **subscription.headers},
                timeout=httpx.Timeout(self._timeout, read=_STREAM_SILENCE_SECONDS),
            ) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                raise self._failure(answer)
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

    @property
    def _where(self) -> str:
        return f"unix:{self._endpoint.uds}" if self._endpoint.uds else self._endpoint.url

    def _not_kvstow(self) -> str:
        return f"{self._where} does not seem to be KVStow"

    def _failure(self, answer: httpx.Response) -> ApiError:
        try:
            problem = decode(ProblemView, json.loads(answer.content))
        except (ValueError, TypeError):
            status = answer.status_code
            return ApiError(
                f"{self._not_kvstow()}: it answers with status {status} and no problem of KVStow", status=status
            )
        return ApiError(f"{problem.title}: {problem.detail}", problem)

    @contextmanager
    def _as_api_errors(self) -> Iterator[None]:
        """Turns errors of httpx into `ApiError`s that name the server."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise ApiError(f"{self._where} did not answer in time") from error
        except httpx.HTTPError as error:
            raise ApiError(f"{self._where} cannot be reached: {error}") from error


def _verify(endpoint: Endpoint) -> dict[str, Any]:
    """Without TLS the system's certificates are not loaded, which takes 30 ms."""
    if endpoint.tls is not None:
        return {"verify": endpoint.tls}
    return {} if endpoint.url.startswith("https:") else {"verify": False}
