"""Values of a JSON object from another process: each is checked before it is used, and unknown ones are ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvstow.errors import InvalidRequestError, ProtocolError

_MAX_TEXT = 4096
_MAX_ITEMS = 4096
_MAX_NUMBER = 1 << 62


def parse_object(payload: bytes, what: str) -> JsonObject:
    """Raises `ProtocolError` if the payload is not a JSON object."""
    try:
        return JsonObject(json.loads(payload), what)
    except (ValueError, RecursionError, InvalidRequestError) as error:
        raise ProtocolError("malformed", f"{what}: {error}") from error


class JsonObject:
    """Every method raises `InvalidRequestError`, which names the field, if the field is missing or has another type. If
    there is a default, it replaces a missing field and null."""

    __slots__ = ("_values", "_what")

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{what} is {_shown(value)}; allowed: an object")
        self._values: dict[str, Any] = value
        self._what = what

    def text(self, name: str, default: str | None = None, *, allowed: tuple[str, ...] = ()) -> str:
        value = self._value(name, default)
        if type(value) is not str or len(value) > _MAX_TEXT:
            raise self._error(name, value, f"a text of at most {_MAX_TEXT} characters")
        if allowed and value not in allowed:
            raise self._error(name, value, ", ".join(allowed))
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            raise self._error(name, value, "a whole number, 0 or more")
        return value

    def optional_whole(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.whole(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._error(name, value, "true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty if it is missing."""
        values = self._list(name)
        if not all(type(value) is str and len(value) <= _MAX_TEXT for value in values):
            raise self._error(name, values, "a list of texts")
        return tuple(values)

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if it is missing."""
        values = self._list(name)
        if not all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in values):
            raise self._error(name, values, "a list of whole numbers, 0 or more")
        return tuple(values)

    def text_pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """An object of texts, as pairs in order of their names; empty if it is missing."""
        values = self._values.get(name)
        if values is None:
            return ()
        if type(values) is not dict or len(values) > _MAX_ITEMS:
            raise self._error(name, values, "an object of texts")
        if not all(type(value) is str and len(key) + len(value) <= _MAX_TEXT for key, value in values.items()):
            raise self._error(name, values, "an object of texts")
        return tuple(sorted(values.items()))

    def child(self, name: str) -> JsonObject:
        return JsonObject(self._value(name, None), f"{self._what}.{name}")

    def optional_child(self, name: str) -> JsonObject | None:
        return None if self._values.get(name) is None else self.child(name)

    def children(self, name: str) -> Iterator[JsonObject]:
        """A list of objects; empty if it is missing."""
        for number, value in enumerate(self._list(name)):
            yield JsonObject(value, f"{self._what}.{name}[{number}]")

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise InvalidRequestError(f"{self._what}.{name} is missing")
        return default

    def _list(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            return []
        if type(values) is not list or len(values) > _MAX_ITEMS:
            raise self._error(name, values, f"a list of at most {_MAX_ITEMS}")
        return values

    def _error(self, name: str, value: Any, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._what}.{name} is {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
