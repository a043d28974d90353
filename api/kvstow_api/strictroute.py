"""Routes that refuse everything that they do not define: unknown parameters, unexpected bodies, ambiguous JSON.

pydantic's JSON parser is not used: it keeps the last of duplicate names, and has no setting to refuse them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple, Never, get_type_hints

from fastapi import Request, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

_MAX_INTEGER = 1 << 63
MAX_ERRORS = 20
"""Errors in one response: a body of 1 MiB could have half a million."""


class StrictRoute(APIRoute):
    """Parses the body as a `StrictRequest`, and refuses a body or query parameters if the endpoint has none: a change
    must not ignore `?dry_run=true`. The operation id is the name of the endpoint."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **{**options, "operation_id": endpoint.__name__})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        wanted = _models(self.endpoint)

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            unwanted: list[tuple[tuple[str, ...], str]] = []
            if "query" not in wanted:
                unwanted += [(("query", name), text) for name, text in strict.query_params.items()]
            if "body" not in wanted and strict.method != "GET" and (body := await strict.body()):
                unwanted.append((("body",), body.decode("utf-8", "replace")))
            if unwanted:
                raise RequestValidationError([_unwanted(where, text) for where, text in unwanted])
            if "body" in wanted and await strict.body():
                with suppress(json.JSONDecodeError):  # the handler parses it again, and answers the error
                    await strict.json()
            return await handler(strict)

        return handle


def names_beside(endpoint: Callable[..., Any], where: Sequence[str]) -> list[str]:
    """The names that `endpoint` defines beside an unknown one. `where`: body or query, and the path to that name."""
    part, *path = where[:-1]
    model = _models(endpoint)[part]
    for name in path:
        model = model.model_fields[name].annotation
    return [field.alias or name for name, field in getattr(model, "model_fields", {}).items()]


@cache
def _models(endpoint: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of the endpoint's query and body, if it has them."""
    found: dict[str, Any] = {}
    for hint in get_type_hints(endpoint, include_extras=True).values():
        marks = getattr(hint, "__metadata__", ())
        plain = getattr(hint, "__origin__", hint)
        if any(isinstance(mark, params.Query) for mark in marks):
            found["query"] = plain
        elif any(isinstance(mark, params.Body) for mark in marks) or _is_model(plain):
            found["body"] = plain
    return found


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _unwanted(where: tuple[str, ...], text: str) -> dict[str, Any]:
    message = f"No {'query parameters are' if where[0] == 'query' else 'body is'} allowed here"
    return {"type": "unwanted", "loc": where, "msg": message, "input": text}


class StrictRequest(Request):
    """A request that accepts only JSON with finite numbers, 64-bit integers and no duplicate names."""

    async def json(self) -> Any:
        """Raises `JSONDecodeError`, or `RequestValidationError` for numbers that are too large."""
        if not hasattr(self, "_json"):
            self._json = _parse(await self.body())
        return self._json


class _TooLarge(NamedTuple):
    """Takes the place of a number in the parsed value."""

    text: str
    allowed: str


def _parse(text: bytes) -> Any:
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite, parse_int=_integer
        )
        wrong = list(islice(_too_large(value, ("body",)), MAX_ERRORS))
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    if wrong:
        raise RequestValidationError(wrong)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate name {name[:40]!r}")
    return value


def _refuse(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float | _TooLarge:
    value = float(text)
    return value if isfinite(value) else _TooLarge(text, "a finite number")


def _integer(text: str) -> int | _TooLarge:
    if len(text) <= 20 and -_MAX_INTEGER <= int(text) < _MAX_INTEGER:
        return int(text)
    return _TooLarge(text, "a 64-bit integer")


def _too_large(value: Any, where: tuple[int | str, ...]) -> Iterator[dict[str, Any]]:
    if isinstance(value, _TooLarge):
        message = f"Input should be {value.allowed}"
        yield {"type": "too_large", "loc": where, "msg": message, "input": value.text}
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _too_large(inner, (*where, name))
