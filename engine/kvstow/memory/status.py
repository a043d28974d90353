"""What a pool says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PoolState = Literal["pinning", "ready", "degraded", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One view of a pool. `degraded`: a chunk failed; `failed`: an error that nobody expected. In both,
    `error_reason` and `error` say why, the pinned slots stay usable, and `retry` or a new target tries again.
    `pin_rate_bytes_per_second` is that of the current or last growth; None until a chunk of it is pinned.
    `pin_failures` counts them by reason; `numa_bytes`: memory by NUMA node, empty where the kernel does not tell."""

    state: PoolState
    pinned_slots: int
    target_slots: int
    pinned_bytes: int
    target_bytes: int
    resident_bytes: int
    locked_bytes: int
    pin_mode: str
    notice: str | None
    pin_rate_bytes_per_second: float | None
    pin_elapsed_seconds: float
    chunks_done: int
    chunks_total: int
    chunks_failed: int
    error_reason: str | None
    error: str | None
    pin_failures: Mapping[str, int]
    numa_bytes: Mapping[int, int]
