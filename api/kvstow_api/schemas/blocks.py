"""Keys that are looked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstow_api.schemas.base import Body, KeyText

MAX_KEYS = 4096


class LookupBody(Body):
    """Keys of consecutive blocks, root first."""

    keys: Annotated[list[KeyText], Field(min_length=1, max_length=MAX_KEYS, fail_fast=True)]
