"""Lists that come in pages."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvstow_api.schemas.base import Query

_TOKEN_BYTES = 6


def token_of(position: int | None) -> str | None:
    """The page token that leads to `position`; None for None, the end."""
    return None if position is None else base64.urlsafe_b64encode(position.to_bytes(_TOKEN_BYTES, "big")).decode()


def _position_of(token: str) -> int:
    """The number in `token`; 0 for none. Raises the validation error of what no answer has said."""
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b"?"
    if token and len(raw) != _TOKEN_BYTES:
        allowed = "the next_page_token of an earlier answer"
        raise PydanticCustomError("page_token", "not a page token; allowed: {allowed}", {"allowed": allowed})
    return int.from_bytes(raw, "big")


def _check_token(token: str) -> str:
    _position_of(token)
    return token


class PageQuery(Query):
    """Which part of a list."""

    page_size: Annotated[int, Field(ge=1, le=1000, description="How many at most")] = 100
    page_token: Annotated[
        str, AfterValidator(_check_token), Field(description="`next_page_token` of the page before")
    ] = ""

    @property
    def position(self) -> int:
        """The number in `page_token`."""
        return _position_of(self.page_token)
