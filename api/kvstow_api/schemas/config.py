"""Changes of settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvstow_api.schemas.base import Body, PositiveSeconds
from kvstow_api.schemas.operations import WorkQuery
from kvstow_api.schemas.pools import RuntimePatch


class ConfigPatch(Body):
    """A merge patch of the configuration. What it says of `startup` must be as it is: changing that takes a
    restart."""

    runtime: RuntimePatch = RuntimePatch()
    startup: dict[str, Any] = Field({}, examples=[{}])


class ConfigQuery(WorkQuery):
    dry_run: Annotated[bool, Field(description="Say what would be done, and do nothing")] = False


class LogLevelBody(Body):
    """A level for one logger of KVStow and those below it, for `ttl_seconds` or (null) until it is set again."""

    logger: Annotated[str, Field(max_length=100, examples=["kvstow.api"])] = "kvstow"
    level: Literal["debug", "info", "warning", "error"]
    ttl_seconds: Annotated[PositiveSeconds, Field(le=86400)] | None = Field(None, examples=[600.0])
