"""How a view is filled: from a snapshot of the engine, or from the JSON of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import datetime
from functools import cache
from operator import attrgetter, itemgetter
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints


class View:
    """Base of all views: dataclasses with keyword-only fields."""

    __slots__ = ()

    @classmethod
    def of(cls, source: object) -> Self:
        """Filled from the items of a mapping, or else from the attributes, that have the fields' names; views
        within it likewise. What `source` has beyond them is left out.

        Raises `ValueError` or `TypeError` for what lacks a field without a default, or has another shape.
        """
        given: dict[str, Any] = {}
        view: type = cls
        for name, getter, convert, optional in _plan(view, isinstance(source, Mapping)):
            try:
                value = getter(source)
            except (KeyError, AttributeError):
                if not optional:
                    raise ValueError(f"{cls.__name__}.{name} is missing") from None
                continue
            given[name] = convert(value)
        return cls(**given)


@cache
def _plan(cls: type, is_mapping: bool) -> list[tuple[str, Callable[[Any], Any], Callable[[Any], Any], bool]]:
    """Per field: its name, how it is read, how its value is converted, and whether it may be absent."""
    hints = get_type_hints(cls)
    reader: Callable[[str], Callable[[Any], Any]] = itemgetter if is_mapping else attrgetter
    return [
        (field.name, reader(field.name), _converter(hints[field.name]), not _is_required(field))
        for field in fields(cls)
    ]


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Turns what JSON or the engine has into a value of type `hint`."""
    origin = get_origin(hint)
    if isinstance(hint, type) and issubclass(hint, View):
        return hint.of
    if hint is datetime:
        return lambda value: datetime.fromisoformat(value) if isinstance(value, str) else value
    if hint is float:
        return float
    if origin is list:
        item = _converter(get_args(hint)[0])
        return lambda values: [item(value) for value in values]
    if origin is dict:
        inner = _converter(get_args(hint)[1])
        return lambda values: {key: inner(value) for key, value in values.items()}
    if origin in (Union, UnionType):
        (chosen,) = [_converter(part) for part in get_args(hint) if part is not NoneType]
        return lambda value: None if value is None else chosen(value)
    return lambda value: value
