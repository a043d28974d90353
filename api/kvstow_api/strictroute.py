"""Routes that take what they ask for, and nothing else: no unknown names, and nothing that only looks like a number."""

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
"""Of one request, told in one answer: a body of 1 MiB could hold half a million."""


class StrictRoute(APIRoute):
    """Reads its body as `StrictRequest` does; where it asks for no body or no query, a request that brings one is
    refused: `?dry_run=true` must not be overlooked by what then changes something. Described under its function's
    name."""

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
                with suppress(json.JSONDecodeError):  # the handler reads it again, and answers that
                    await strict.json()
            return await handler(strict)

        return handle


def names_beside(endpoint: Callable[..., Any], where: Sequence[str]) -> list[str]:
    """The names that `endpoint` knows in the place of an unknown one: `where` is body or query, and the path to it."""
    part, *path = where[:-1]
    model = _models(endpoint)[part]
    for name in path:
        model = model.model_fields[name].annotation
    return [field.alias or name for name, field in getattr(model, "model_fields", {}).items()]


@cache
def _models(endpoint: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of the endpoint's query and body, where it has them."""
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
    message = f"This takes no {'query parameters' if where[0] == 'query' else 'body'}"
    return {"type": "unwanted", "loc": where, "msg": message, "input": text}


class StrictRequest(Request):
    """A request whose JSON has only finite numbers, integers of 64 bits, and each name once."""

    async def json(self) -> Any:
        """Raises `JSONDecodeError`, and `RequestValidationError` for a number that is too large."""
        if not hasattr(self, "_json"):
            self._json = _parse(await self.body())
        return self._json


class _TooLarge(NamedTuple):
    """Stands where the number stood."""

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
        raise ValueError(f"{name[:40]!r} is there twice")
    return value


def _refuse(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float | _TooLarge:
    value = float(text)
    return value if isfinite(value) else _TooLarge(text, "a finite number")


def _integer(text: str) -> int | _TooLarge:
    if len(text) <= 20 and -_MAX_INTEGER <= int(text) < _MAX_INTEGER:
        return int(text)
    return _TooLarge(text, "an integer of 64 bits")


def _too_large(value: Any, where: tuple[int | str, ...]) -> Iterator[dict[str, Any]]:
    if isinstance(value, _TooLarge):
        message = f"Input should be {value.allowed}"
        yield {"type": "too_large", "loc": where, "msg": message, "input": value.text}
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _too_large(inner, (*where, name))
