"""The answers about settings and log levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Slots are of one rank; every rank has the same."""

    capacity_slots: int
    policy: str
    pinning_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    """`runtime`: settings that a PATCH of `pool` changes while the engine runs; `etag` names them. All three are null
    while there is no pool. `startup`: settings that need a restart."""

    pool: str | None
    etag: str | None
    runtime: RuntimeConfig | None
    startup: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelView:
    """Level of one logger of KVStow."""

    logger: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevelsView:
    items: list[LogLevelView]
