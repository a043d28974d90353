"""Settings: those that can change while the engine runs, and those it was started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvstow_api.views.base import View


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(View):
    """Slots are of one rank; every rank has the same."""

    capacity_slots: int
    policy: Literal["lru", "arc"]
    pinning_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView(View):
    """`runtime` can be changed by a PATCH that carries `etag` as If-Match; `startup` needs a restart."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "etag": '"6f1d2a9c-3"',
                    "runtime": {"capacity_slots": 4096, "policy": "lru", "pinning_paused": False},
                    "startup": {"ranks": 2, "transfer_timeout": 30.0},
                }
            ]
        }
    }

    etag: str
    runtime: RuntimeConfig
    startup: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelView(View):
    """Level of one logger of KVStow; `ttl_seconds_left` until it goes back, null where it stays."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {"examples": [{"logger": "kvstow.api", "level": "debug", "ttl_seconds_left": 299.0}]}
    }

    logger: str
    level: str
    ttl_seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelsView(View):
    items: list[LogLevelView]
