"""Settings of the engine and of a rank's pool, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvstow.errors import ConfigError

POLICIES = ("auto", "lru")
ALLOWED_POLICIES = "auto, lru"

CopyStrategy = Literal["auto", "staged", "direct"]
COPY_STRATEGIES: tuple[CopyStrategy, ...] = get_args(CopyStrategy)

HugePages = Literal["advised", "reserved"]
HUGE_PAGES: tuple[HugePages, ...] = get_args(HugePages)


def parse_policy(value: object, key: str = "policy") -> str:
    """Check a pool's policy of eviction. `auto` learns from the traffic when blocks are used again; `lru` evicts the
    block that has been unused for the longest time. Raises `ConfigError` for `key`."""
    if value not in POLICIES:
        raise ConfigError(key, value, ALLOWED_POLICIES)
    return str(value)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The control plane of one pool. Times are in seconds.

    `rank_slot_bytes`: bytes of a slot on each rank, if they differ (pipeline stages of different depth); `slot_bytes`
    is then the largest of them. If it is empty, slots have `slot_bytes` on all ranks. `capacity_slots`: slots wanted on
    every rank. `policy`: see `parse_policy`. `curve`: whether to estimate what pools of other sizes would hit, at a
    cost for each request. `block_tokens`: tokens in a block, for the counters of tokens; None if the host does not know
    it. `transfer_timeout`: an op older than this is stuck. A stuck store is abandoned, and its slots are quarantined
    until every rank has finished it; a stuck load keeps waiting, because a rank may still write its blocks.
    `report_timeout`: a rank that is silent for longer is not ready. `event_buffer`: how many stored and removed events
    are kept for slow readers. It is also the number of keys that they have together at most, or two keys for each slot
    of the pool if that is more. `replicated`: all ranks of a `SharedPool` have the same KV. Rank 0 stores it for all of
    them, and every rank loads it.
    """

    slot_bytes: int
    capacity_slots: int
    num_ranks: int = 1
    policy: str = "auto"
    curve: bool = True
    block_tokens: int | None = None
    transfer_timeout: float = 30.0
    report_timeout: float = 5.0
    event_buffer: int = 4096
    rank_slot_bytes: tuple[int, ...] = ()
    replicated: bool = False

    def __post_init__(self) -> None:
        for key in ("slot_bytes", "capacity_slots", "num_ranks", "event_buffer"):
            _require_positive(key, getattr(self, key))
        if self.block_tokens is not None:
            _require_positive("block_tokens", self.block_tokens)
        for key in ("transfer_timeout", "report_timeout"):
            if not getattr(self, key) > 0:
                raise ConfigError(key, getattr(self, key), "more than 0 seconds")
        parse_policy(self.policy)
        self._check_ranks()

    def _check_ranks(self) -> None:
        if not self.rank_slot_bytes:
            return
        if len(self.rank_slot_bytes) != self.num_ranks:
            allowed = f"none, or one for each of {self.num_ranks} ranks"
            raise ConfigError("rank_slot_bytes", self.rank_slot_bytes, allowed)
        for size in self.rank_slot_bytes:
            _require_positive("rank_slot_bytes", size)
        if self.slot_bytes != max(self.rank_slot_bytes):
            allowed = f"{max(self.rank_slot_bytes)}, the largest of rank_slot_bytes"
            raise ConfigError("slot_bytes", self.slot_bytes, allowed)

    def slot_bytes_of(self, rank: int) -> int:
        """Bytes of a slot on this rank."""
        return self.rank_slot_bytes[rank] if self.rank_slot_bytes else self.slot_bytes

    @property
    def storing_ranks(self) -> range:
        """The ranks that a store has to finish on."""
        return range(1 if self.replicated else self.num_ranks)

    @property
    def total_slot_bytes(self) -> int:
        """Bytes of a slot on all ranks together."""
        return sum(map(self.slot_bytes_of, range(self.num_ranks)))


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One rank's host pool. Sizes are in bytes, times in seconds.

    `pool_bytes` is rounded down to whole slots. `max_bytes` limits later growth: only address space is reserved for it.
    `lock`: lock or register the memory; otherwise it is only populated. `huge_pages`: `advised` asks the kernel for
    huge pages if it has any; `reserved` uses only the 2 MiB pages that the machine has set aside (Linux 5.18).

    The pace of pinning is adaptive: `latency_target` is how much it may add to a step of an engine that shares the
    driver (1.8 ms by default). It is fixed instead if `chunk_bytes` (per call, at least one slot; 64 MiB by default) or
    `pause` (between two calls; 2 ms by default) is given.
    """

    slot_bytes: int
    pool_bytes: int
    max_bytes: int = 0
    chunk_bytes: int | None = None
    pause: float | None = None
    latency_target: float | None = None
    lock: bool = True
    huge_pages: HugePages = "advised"

    def __post_init__(self) -> None:
        for key in ("slot_bytes", "pool_bytes"):
            _require_positive(key, getattr(self, key))
        if self.pool_bytes < self.slot_bytes:
            raise ConfigError("pool_bytes", self.pool_bytes, f"at least one slot, {self.slot_bytes} bytes")
        if self.max_bytes and self.max_bytes < self.pool_bytes:
            raise ConfigError("max_bytes", self.max_bytes, f"0 (as pool_bytes), or at least {self.pool_bytes}")
        if self.huge_pages not in HUGE_PAGES:
            raise ConfigError("huge_pages", self.huge_pages, " or ".join(HUGE_PAGES))
        self._check_pace()

    def _check_pace(self) -> None:
        if self.chunk_bytes is not None:
            _require_positive("chunk_bytes", self.chunk_bytes)
        if self.pause is not None and not 0 <= self.pause < float("inf"):
            raise ConfigError("pause", self.pause, "0 or more seconds")
        if self.latency_target is None:
            return
        if not 0 < self.latency_target < float("inf"):
            raise ConfigError("latency_target", self.latency_target, "more than 0 seconds")
        if self.has_fixed_pace:
            raise ConfigError("latency_target", self.latency_target, "none beside chunk_bytes or pause (a fixed pace)")

    @property
    def has_fixed_pace(self) -> bool:
        return self.chunk_bytes is not None or self.pause is not None

    @property
    def capacity_slots(self) -> int:
        return self.pool_bytes // self.slot_bytes

    @property
    def max_slots(self) -> int:
        return max(self.max_bytes, self.pool_bytes) // self.slot_bytes


def _require_positive(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(key, value, "a whole number, 1 or more")
