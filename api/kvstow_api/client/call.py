"""One request as a value, the parts that requests are made of, and the error of one that fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kvstow.errors import KvstowError
from kvstow_api.answers import OperationView, ProblemView
from kvstow_api.client.decoding import decode

T = TypeVar("T")
V = TypeVar("V")


class ApiError(KvstowError):
    """A request that failed. `problem` is the server's answer; None if the server could not be reached, did not answer
    in time, or sent something else. `status` is that of the answer, None without one."""

    code = "request_failed"

    def __init__(self, message: str, problem: ProblemView | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.status = problem.status if problem else status

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, ProblemView | None, int | None]]:
        return type(self), (str(self), self.problem, self.status)


class Reply(NamedTuple):
    """An answer that is not a problem."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to decode its answer. `patience`: seconds that the server may wait before it answers.
    `accepts`: statuses from 400 on that are not errors here."""

    method: str
    path: str
    decode: Callable[[Reply], T]
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float = 0.0
    accepts: frozenset[int] = frozenset()


def get(path: str, view: type[V], **given: object) -> Call[V]:
    """A GET of `path` with the query parameters `given`."""
    return Call("GET", path, decoded(view), params(**given))


def work(
    method: str, path: str, view: type[V], wait: float | None, body: Any, headers: Mapping[str, str] | None = None
) -> Call[V | OperationView]:
    """A request that changes something; the answer is an operation (202) if that takes longer than `wait`."""

    def read(reply: Reply) -> V | OperationView:
        answer = json.loads(reply.body)
        return decode(OperationView, answer) if reply.status == 202 else decode(view, answer)

    return Call(method, path, read, params(wait=wait), body, headers or {}, patience=wait or 0.0)


def params(**given: object) -> dict[str, str]:
    """Query parameters; None and empty ones are left out."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    return {name: text for name, text in texts.items() if given[name] not in (None, "")}


def fields(**given: object) -> dict[str, object]:
    """The fields of a body; None is left out."""
    return {name: value for name, value in given.items() if value is not None}


def if_matching(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": etag}


def decoded(view: type[V]) -> Callable[[Reply], V]:
    return lambda reply: decode(view, json.loads(reply.body))


def nothing(reply: Reply) -> None:
    """For 204, which has no body."""
