"""What this server is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from kvstow_api.schemas.base import View


class InfoView(View):
    """`addresses`: where the server listens. `engine_id` is new in each life of the engine. `token_required`: whether
    changes need a bearer token."""

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
