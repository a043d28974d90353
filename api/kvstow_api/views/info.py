"""What a server is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from kvstow_api.views.base import View


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoView(View):
    """`addresses`: where the server listens. `engine_id` is new in each life of the engine. `token_required`: whether
    changes need a bearer token, or a client certificate."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "name": "kvstow",
                    "version": "0.1.0",
                    "mode": "standalone",
                    "addresses": ["http://127.0.0.1:9595"],
                    "engine_id": "6f1d2a9c",
                    "started": "2026-11-02T09:30:00Z",
                    "uptime_seconds": 12.5,
                    "token_required": False,
                    "num_ranks": 2,
                    "pools": ["host"],
                    "build": {"torch": "2.13.0"},
                    "settings": {"ranks": 2},
                }
            ]
        }
    }

    name: str = "kvstow"
    version: str
    mode: str
    addresses: list[str]
    engine_id: str
    started: datetime
    uptime_seconds: float
    token_required: bool
    num_ranks: int
    pools: list[str]
    build: dict[str, str]
    settings: dict[str, Any]
