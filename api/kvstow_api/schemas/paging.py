"""Lists that come in pages."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import Field

from kvstow.errors import InvalidRequestError
from kvstow_api.schemas.base import Query

_TOKEN_BYTES = 6


class PageQuery(Query):
    """Which part of a list."""

    page_size: Annotated[int, Field(ge=1, le=1000)] = 100
    page_token: Annotated[str, Field(description="`next_page_token` of the page before")] = ""

    @property
    def position(self) -> int:
        """The number in `page_token`; 0 without one. Raises `InvalidRequestError` for what no answer has said."""
        token = self.page_token
        try:
            raw = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b"?"
        if token and len(raw) != _TOKEN_BYTES:
            raise InvalidRequestError(
                f"page_token is {token[:40]!r}; allowed: the next_page_token of an earlier answer"
            )
        return int.from_bytes(raw, "big")


def token_of(position: int | None) -> str | None:
    """The page token that leads to `position`; None for None, the end."""
    return None if position is None else base64.urlsafe_b64encode(position.to_bytes(_TOKEN_BYTES, "big")).decode()
