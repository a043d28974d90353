"""The machine's memory, as far as the pools of an engine's ranks need it."""

from __future__ import annotations

import threading

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.errors import InsufficientMemoryError
from kvstow.memory.limits import limits_of
from kvstow.memory.region import round_up
from kvstow.memory.slotpool import SlotPool
from kvstow_service.connectors.engine_core.options import ConnectorOptions, refusal
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess


def require_memory(options: ConnectorOptions, process: VLLMProcess) -> int:
    """How many bytes are available to the pools of this node's ranks together; 0 if no limit can be read. Raises
    `InsufficientMemoryError` if the pools do not fit. Call it before any of them begins to pin."""
    limits = limits_of(options.huge_pages)
    shortage = limits.shortage(
        round_up(options.bytes_of_rank(process.num_ranks), limits.page_bytes) * process.ranks_per_node
    )
    if shortage is not None:
        raise InsufficientMemoryError(
            f"{process.ranks_per_node} x {format_size(options.bytes_of_rank(process.num_ranks))} of pool cannot fit: "
            f"{shortage.message}"
        )
    headroom = limits.headroom()
    return 0 if headroom is None else max(0, headroom.num_bytes - limits.reserve_bytes)


def rank_pool_config(options: ConnectorOptions, slot_bytes: int, pool_bytes: int, max_bytes: int) -> PoolConfig:
    """The pool of a rank, which gets `pool_bytes` at first and may grow to `max_bytes`. Raises `ConfigError`."""
    if (most := max(pool_bytes, max_bytes)) < slot_bytes:
        raise refusal("cpu_bytes_to_use", most, f"at least one block, {slot_bytes} bytes on this rank")
    return options.pool_config(slot_bytes, max(slot_bytes, pool_bytes), max_bytes)


def wait_until_pinned(pool: SlotPool) -> None:
    """Return when the pool has reached its size or stopped growing."""
    changed = threading.Event()
    pool.add_listener(changed.set)
    while pool.status().state == "pinning":
        changed.wait()
        changed.clear()
