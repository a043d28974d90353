"""Blocks that are asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstow_api.schemas.base import Body, Key
from kvstow_api.schemas.paging import PageQuery
from kvstow_api.views.blocks import BlockState

MAX_KEYS = 4096


class BlocksQuery(PageQuery):
    state: Annotated[BlockState | None, Field(description="Only blocks in this state")] = None


class LookupBody(Body):
    """Keys of consecutive blocks, root first."""

    keys: Annotated[list[Key], Field(min_length=1, max_length=MAX_KEYS, fail_fast=True)]
