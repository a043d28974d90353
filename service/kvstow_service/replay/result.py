"""What a replay found: counted while it runs, frozen when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstow.keys import format_key
from kvstow_service.replay.kv import Mismatch
from kvstow_service.replay.offload import PoolCounts

_NAMED_MISMATCHES = 5


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of a replay. Blocks count once, whatever the number of ranks; bytes are summed over the ranks.

    `hit_blocks`: the leading runs that lookups found; `block_hit_rate` is their share of `blocks`.
    `stored_bytes`, `loaded_bytes`: moved by copies that succeeded. `load_gbps`, `store_gbps`: these bytes in
    10^9 bytes per second that the ranks' copies were busy, so the rate of one rank, without waiting and
    checking; 0 where nothing was moved. `verified_bytes`: loaded bytes that were compared with what was
    stored; `mismatches`: (block, rank) pairs with any wrong byte. `dropped_stores`: blocks that found no slot, by
    reason in `drops`. `failed_loads`: blocks whose load failed and which were computed again; `failed_stores`:
    blocks that stayed unpublished. `abandoned`: requests cut off by a stop. `seconds`: wall clock.
    `policy` and `evicted_blocks` are of the pool, and None where the node service has it. `mean_request_seconds`: from
    the start of a request until its last block is loaded or computed.
    """

    requests: int
    blocks: int
    hit_blocks: int
    block_hit_rate: float
    stored_blocks: int
    loaded_blocks: int
    stored_bytes: int
    loaded_bytes: int
    verified_bytes: int
    mismatches: int
    first_mismatches: tuple[str, ...]
    evicted_blocks: int | None
    dropped_stores: int
    drops: Mapping[str, int]
    failed_loads: int
    failed_stores: int
    abandoned: int
    load_gbps: float
    store_gbps: float
    seconds: float
    policy: str | None
    ranks: int
    slots: int
    mean_request_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every loaded byte was right."""
        return self.mismatches == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Running figures, which can be pickled. `load_seconds` and `store_seconds` are the busy times of copies, summed
    over the ranks; `first_blocks` and `first_hit_blocks` are of the first request."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    verified_bytes: int = 0
    mismatches: int = 0
    first_mismatches: list[str] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    failed_loads: int = 0
    failed_stores: int = 0
    abandoned: int = 0
    first_blocks: int = 0
    first_hit_blocks: int = 0
    request_seconds: float = 0.0
    """From the start of each request until its last block was loaded or computed."""

    def add(self, other: Tally) -> None:
        """Add the figures of a replay that came after this one, or ran beside it."""
        for name in self.__slots__:
            if name not in ("first_mismatches", "drops", "first_blocks", "first_hit_blocks"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.drops.update(other.drops)
        self.first_mismatches = (self.first_mismatches + other.first_mismatches)[:_NAMED_MISMATCHES]

    def count_mismatches(self, found: Sequence[Mismatch]) -> None:
        self.mismatches += len(found)
        for wrong in found[: _NAMED_MISMATCHES - len(self.first_mismatches)]:
            self.first_mismatches.append(
                f"key {format_key(wrong.key)} in block {wrong.block}, region {wrong.region} of rank {wrong.rank}"
            )

    def freeze(self, pool: PoolCounts, *, seconds: float, ranks: int) -> ReplayResult:
        return ReplayResult(
            requests=self.requests,
            blocks=self.blocks,
            hit_blocks=self.hit_blocks,
            block_hit_rate=self.hit_blocks / self.blocks if self.blocks else 0.0,
            stored_blocks=self.stored_blocks,
            loaded_blocks=self.loaded_blocks,
            stored_bytes=self.stored_bytes,
            loaded_bytes=self.loaded_bytes,
            verified_bytes=self.verified_bytes,
            mismatches=self.mismatches,
            first_mismatches=tuple(self.first_mismatches),
            evicted_blocks=pool.evicted_blocks,
            dropped_stores=self.drops.total(),
            drops=dict(self.drops),
            failed_loads=self.failed_loads,
            failed_stores=self.failed_stores,
            abandoned=self.abandoned,
            load_gbps=_gbps(self.loaded_bytes, self.load_seconds),
            store_gbps=_gbps(self.stored_bytes, self.store_seconds),
            seconds=seconds,
            policy=pool.policy,
            ranks=ranks,
            slots=pool.slots,
            mean_request_seconds=self.request_seconds / self.requests if self.requests else 0.0,
        )


def _gbps(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9 if seconds > 0 else 0.0
