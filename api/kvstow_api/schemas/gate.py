"""Drain and bypass."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvstow.control.acceptance import DrainMode
from kvstow_api.schemas.base import Body, PositiveSeconds, Seconds


class DrainBody(Body):
    """`stop_stores` takes no new stores; `all` also answers look-ups with misses. `deadline_seconds` is a word to those
    who wait: nothing in flight is broken off when they are over."""

    mode: DrainMode = "all"
    deadline_seconds: Seconds | None = Field(None, examples=[30.0])


class BypassBody(Body):
    """Which direction is switched off, for `ttl_seconds` or (null) until it is switched on again."""

    load: bool | None = Field(None, examples=[True])
    store: bool | None = None
    ttl_seconds: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.load is None and self.store is None:
            raise PydanticCustomError(
                "nothing_given", "at least one of {allowed} is needed", {"allowed": "load, store"}
            )
        return self
