"""Lists that come in pages."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvstow_api.schemas.base import Query

_TOKEN_BYTES = 6


def token_of(position: int | None) -> str | None:
    """The page token that leads to `position`; None for None, the end."""
    return None if position is None else base64.urlsafe_b64encode(position.to_bytes(_TOKEN_BYTES, "big")).decode()


def _position_of(token: str) -> int:
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b"?"
    if token and len(raw) != _TOKEN_BYTES:
        allowed = "the next_page_token of an earlier answer"
        raise PydanticCustomError("page_token", "not a page token; allowed: {allowed}", {"allowed": allowed})
    return int.from_bytes(raw, "big")


class PageQuery(Query):
    """Which part of a list. `position` is the number in the page token; 0 without one."""

    page_size: Annotated[int, Field(ge=1, le=1000, description="How many at most")] = 100
    position: Annotated[
        int,
        PlainValidator(_position_of),
        WithJsonSchema({"type": "string"}),
        Field(alias="page_token", description="`next_page_token` of the page before"),
    ] = 0
