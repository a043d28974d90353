"""The status of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvstow.messages import PoolFigures

PoolState = Literal["pinning", "ready", "degraded", "failed", "closed"]


@dataclass(frozen=True, kw_only=True)
class PoolStatus(PoolFigures):
    """One view of a pool. `degraded`: a chunk failed; `failed`: an unexpected error. In both, `error_reason` and
    `error` say why, the pinned slots stay usable, and `retry` or a new target tries again. `numa_bytes`: memory by NUMA
    node, empty if the kernel does not report it."""

    state: PoolState
    error_reason: str | None
    error: str | None
    numa_bytes: Mapping[int, int]
