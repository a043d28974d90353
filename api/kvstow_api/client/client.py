"""Sends requests to the admin API, and yields its events."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from kvstow.errors import ConfigError, KvstowError, SettingError
from kvstow_api.answers import EventType, EventView, OperationView, ProblemView

T = TypeVar("T")
V = TypeVar("V")

_STREAM_SILENCE_SECONDS = 45.0  # a stream that is silent longer is broken: the server sends a comment every 15 s


DEFAULT_SERVER = "http://127.0.0.1:9595"

_ALLOWED = "http://HOST:PORT, https://HOST:PORT or unix:/PATH"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address, token and TLS settings of a server.

    `token_file` is read for each request, so a new token takes effect at once. `tls` verifies the server, and may hold
    the client's certificate. None means that the system's trust store is used.
    """

    url: str
    uds: Path | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(
        cls,
        server: str,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Make an endpoint from `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`. Raises `ConfigError`."""
        if token is not None and token_file is not None:
            raise SettingError("token_file", str(token_file), "cannot be combined with a token")
        if server.startswith("unix:"):
            path = server.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ConfigError("server", server, _ALLOWED)
            return cls("http://localhost", Path(path), token, token_file, tls)
        if not _is_url(server):
            raise ConfigError("server", server, _ALLOWED)
        return cls(server.rstrip("/"), None, token, token_file, tls)

    def credentials(self) -> Mapping[str, str]:
        """Return the header with the token, if there is one. Raises `ConfigError` if its file cannot be read."""
        token = self.token
        if self.token_file is not None:
            try:
                lines = self.token_file.read_text(encoding="latin-1").split()
            except OSError as error:
                raise ConfigError("token_file", str(self.token_file), f"a readable file ({error.strerror})") from None
            token = lines[0] if lines else None
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username) and parts.path in ("", "/")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain


class ApiError(KvstowError):
    """A request that failed. `problem` is the server's answer, or None if the server could not be reached, did not
    answer in time, or sent something else. `status` is that of the answer, or None without one."""

    code = "request_failed"

    def __init__(self, message: str, problem: ProblemView | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.status = problem.status if problem else status

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, ProblemView | None, int | None]]:
        return type(self), (str(self), self.problem, self.status)


class ProbeResult(NamedTuple):
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Route(Generic[T]):
    """A route of the API and the type of its answer. `kvstow_api.client.routes` has all routes. With `operation`, work
    that takes longer than `wait` seconds is answered with the operation."""

    method: str
    path: str
    answer: type[T]
    operation: bool = False

    def returning(self, answer: type[V]) -> Route[V]:
        """Return the route for a request whose answer has another type, such as a dry run, or `dict` for the JSON."""
        return Route(self.method, self.path, answer)


class Client:
    """Makes requests one at a time, over persistent connections. Not thread-safe. Close it with `close` or `with`.

    `timeout` is in seconds, for connecting and for each answer. The `wait` of a request is added to it. All failures
    raise `ApiError`.
    """

    def __init__(self, server: str | Endpoint = DEFAULT_SERVER, *, timeout: float = 10.0) -> None:
        self._endpoint = endpoint = Endpoint.parse(server) if isinstance(server, str) else server
        self._timeout = timeout
        uds = None if endpoint.uds is None else str(endpoint.uds)
        transport = httpx.HTTPTransport(uds=uds, **_verify(endpoint))
        self._http = httpx.Client(base_url=endpoint.url, transport=transport)

    def call(
        self,
        route: Route[T],
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        **given: Any,
    ) -> T:
        """Make a request, and return its answer. `given` has the values of names in the route's path. The others are
        query parameters; None means that a parameter is not sent.

        Keys of blocks are hex text, as in answers. `pool` names a pool. That of an embedded engine is `host`. `wait` is
        how many seconds (at most 30) the server may wait for the end of the work before it answers.
        """
        path, query = _filled(route.path, given)
        with self._as_api_errors():
            answer = self._http.request(
                route.method,
                path,
                params=query,
                json=body,
                headers={**self._endpoint.credentials(), **(headers or {})},
                timeout=httpx.Timeout(self._timeout, read=self._timeout + (given.get("wait") or 0.0)),
            )
        is_probe = cast(Any, route.answer) is ProbeResult
        if answer.status_code >= 400 and not (is_probe and answer.status_code == 503):
            raise self._failure(answer)
        try:
            return _read(route, answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            request = f"{route.method} {path}"
            message = f"{self._not_kvstow()}, or is another version: unexpected answer to {request}: {error}"
            raise ApiError(message) from error

    def events(
        self,
        types: Sequence[EventType] = (),
        *,
        after: str | None = None,
        recent: int = 0,
        pool: str | None = None,
    ) -> Iterator[EventView]:
        """Yield events of these types as they arrive. Without types, the server chooses. The events begin after the one
        with the id `after` or, without one, with the last `recent` events. With `pool`, events of other pools are left
        out. Events of blocks need it if there are several pools. Returns when the server ends the stream, and raises
        when the connection breaks."""
        given = {"types": types, "recent": recent, "pool": pool}
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        yield from parse_events(self._lines("GET", "/v1/events", given, None, headers))

    def record(self, pool: str, *, seconds: float, max_bytes: int) -> Generator[str, None, None]:
        """Record the requests of a pool. Yields the lines of the trace as they come. The last one is about the
        recording itself. Empty lines show that the server is alive. Raises when the connection breaks."""
        body = {"seconds": seconds, "max_bytes": max_bytes}
        yield from self._lines("POST", "/v1/pools/{pool}/trace", {"pool": pool}, body, {})

    def _lines(
        self, method: str, path: str, given: Mapping[str, Any], body: Any, headers: Mapping[str, str]
    ) -> Iterator[str]:
        path, query = _filled(path, given)
        with (
            self._as_api_errors(),
            self._http.stream(
                method,
                path,
                params=query,
                json=body,
                headers={**self._endpoint.credentials(), **headers},
                timeout=httpx.Timeout(self._timeout, read=_STREAM_SILENCE_SECONDS),
            ) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                raise self._failure(answer)
            yield from answer.iter_lines()

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
            problem = msgspec.json.decode(answer.content, type=ProblemView)
        except (msgspec.DecodeError, UnicodeDecodeError):
            status = answer.status_code
            return ApiError(
                f"{self._not_kvstow()}: it answers with status {status} and no problem of KVStow", status=status
            )
        return ApiError(f"{problem.title}: {problem.detail}", problem)

    @contextmanager
    def _as_api_errors(self) -> Iterator[None]:
        """Turn errors of httpx into `ApiError`s that name the server."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise ApiError(f"{self._where} did not answer within {self._timeout:g} s") from error
        except httpx.HTTPError as error:
            raise ApiError(f"{self._where} cannot be reached: {error}") from error


def _verify(endpoint: Endpoint) -> dict[str, Any]:
    """Return the TLS options of httpx. Without TLS, the system's certificates are not loaded, which would take 30
    ms."""
    if endpoint.tls is not None:
        return {"verify": endpoint.tls}
    return {} if endpoint.url.startswith("https:") else {"verify": False}


def _filled(path: str, given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    query = {}
    for name, value in given.items():
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", quote(str(value), safe=""))
        elif value is not None and value != "" and value != ():
            text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
            query[name] = text.lower() if isinstance(value, bool) else text
    return path, query


def _read(route: Route[T], answer: httpx.Response) -> T:
    kind = cast(Any, route.answer)
    if kind is ProbeResult:
        return cast(T, ProbeResult(answer.is_success, answer.text))
    if kind in (str, NoneType):
        return cast(T, answer.text if kind is str else None)
    is_operation = route.operation and answer.status_code == 202
    return cast(T, msgspec.json.decode(answer.content, type=OperationView if is_operation else kind))


def parse_events(lines: Iterable[str]) -> Iterator[EventView]:
    """Yield server-sent events from their lines. Raises `ValueError` for invalid JSON."""
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name in ("id", "event", "data"):
                found[name] = value.removeprefix(" ")
            continue
        if "data" in found:
            yield EventView(id=found.get("id", ""), type=found.get("event", ""), data=json.loads(found["data"]))
        found = {}
