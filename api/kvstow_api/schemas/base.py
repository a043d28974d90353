"""What all bodies and queries have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvstow.errors import InvalidRequestError
from kvstow.keys import BlockKey, parse_key


class Body(BaseModel):
    """A request body: no unknown fields, no conversions, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Query(BaseModel):
    """Query parameters: no unknown ones. Texts are converted, as there is nothing else in a query."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _require_true(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("only_true", "must be {allowed}, or left out", {"allowed": "true"})
    return value


OnlyTrue = Annotated[bool, AfterValidator(_require_true), Field(json_schema_extra={"const": True})]
"""`true`, and not the 1 that `Literal[True]` takes for it."""

Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _to_key(given: object) -> BlockKey:
    try:
        return parse_key(given if isinstance(given, str) else "")
    except InvalidRequestError:
        allowed = "hex digits, two for each byte, in quotes"
        raise PydanticCustomError("key", "not a key; allowed: {allowed}", {"allowed": allowed}) from None


_KEY_SCHEMA = {
    "type": "string",
    "pattern": "^([0-9a-fA-F]{2})+$",
    "description": "A key, or its beginning, as hex",
    "examples": ["00017f3a"],
}
Key = Annotated[bytes, PlainValidator(_to_key), WithJsonSchema(_KEY_SCHEMA)]
"""A `BlockKey`, given as hex."""
KeyList = Annotated[list[Key], Field(min_length=1, fail_fast=True)]
"""Tells only the first wrong key: a body of 1 MiB could hold half a million of them."""


def require_one(body: Body, *names: str) -> None:
    """Raises the validation error of a body that has none, or more than one, of the fields `names`."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        shown = [_wire_name(body, name) for name in names]
        raise PydanticCustomError(
            "exactly_one",
            "exactly one of {allowed} is needed, got {given}",
            {
                "allowed": ", ".join(shown),
                "given": ", ".join(_wire_name(body, name) for name in given) or "none",
            },
        )


def names_in(text: str, allowed: Collection[str], noun: str) -> frozenset[str]:
    """The names in `text`, which commas separate. Raises the validation error of one that is not `allowed`."""
    names = frozenset(filter(None, text.split(",")))
    if unknown := sorted(names - frozenset(allowed)):
        raise PydanticCustomError(
            "unknown_name",
            "there is no {noun} {unknown}; there are: {allowed}",
            {"noun": noun, "unknown": ", ".join(unknown), "allowed": ", ".join(allowed)},
        )
    return names


def _wire_name(body: Body, name: str) -> str:
    return type(body).model_fields[name].alias or name
