"""Drain and bypass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvstow.control.acceptance import DrainMode
from kvstow_api.views.base import View


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView(View):
    """`drained`: a drain is on, and nothing is in flight or leased any more."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "active": True,
                    "mode": "all",
                    "deadline_seconds_left": 29.5,
                    "drained": False,
                    "pending_transfers": 3,
                    "leases": 1,
                }
            ]
        }
    }

    active: bool
    mode: DrainMode | None
    deadline_seconds_left: float | None
    drained: bool
    pending_transfers: int
    leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BypassView(View):
    """Which direction is switched off; `ttl_seconds_left` is null where that has no end."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"load": True, "store": False, "ttl_seconds_left": 600.0}]}
    }

    load: bool
    store: bool
    ttl_seconds_left: float | None
