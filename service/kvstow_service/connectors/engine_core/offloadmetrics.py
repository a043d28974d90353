"""The metrics `vllm:kv_offload_*` that vLLM's dashboards read.

Two are left out because KVStow has nothing true to report: `cpu_allocation_size`, and `stores_skipped` (there is no
reuse threshold). The names that vLLM has deprecated (`total_bytes`, `total_time`, `size`) are left out, too. An
embedded engine never observes `lookup_async_delay_seconds`, because it defers no lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from kvstow.stats import DIRECTIONS, DirectionStats, EngineStats, LookupStats

PREFIX = "vllm:kv_offload_"
INFO = "config_info"
LOST_BLOCKS = "blocks_lost_before_store"
"""A metric of blocks that wait to be stored, which vLLM's own connectors do not have."""
ATTACHED, ATTACH_STATE, SESSIONS_LOST = "attached", "attach_state", "sessions_lost"
"""Metrics of engines that attach to a node service. vLLM has no such metrics."""

Changes = dict[str, Any]
"""By name within the family: the growth of a counter, the value of a gauge, the observations of a histogram (a list),
or the labels of an info metric (a mapping)."""

Observe = Callable[[str, float], None]
"""Takes one observation of a histogram of the family, given its name."""


class Metric(NamedTuple):
    """A metric of the family. `labelnames` come after those that vLLM gives every metric."""

    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    bounds: tuple[float, ...] = ()
    labelnames: tuple[str, ...] = ()


_SIZES = DirectionStats().size_bytes.bounds
_DELAYS = LookupStats().seconds.bounds
_DEFERRALS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)

FAMILY: dict[str, Metric] = {
    "load_bytes": Metric("counter", "Bytes loaded from host memory to GPUs, on all ranks"),
    "load_time": Metric("counter", "Seconds of loads from host memory to GPUs, each on its slowest rank"),
    "load_size": Metric("histogram", "Bytes of a load on one rank", _SIZES),
    "store_bytes": Metric("counter", "Bytes stored from GPUs to host memory, on all ranks"),
    "store_time": Metric("counter", "Seconds of stores from GPUs to host memory, each on its slowest rank"),
    "store_size": Metric("histogram", "Bytes of a store on one rank", _SIZES),
    "lookup_sync_delay_seconds": Metric("histogram", "Duration of a lookup in host memory", _DELAYS),
    "lookup_async_delay_seconds": Metric(
        "histogram", "Time from the first step in which a request waits for its lookup to the answer", _DEFERRALS
    ),
    "allocation_failure": Metric("counter", "Blocks that were not stored because host memory had no room for them"),
    "cpu_cache_usage_perc": Metric("gauge", "Share of host memory (0 to 1) held by transfers and admitted hits"),
    "cpu_cache_write_usage_perc": Metric("gauge", "Share of host memory (0 to 1) that stores are filling"),
    "cpu_cache_read_usage_perc": Metric("gauge", "Share of host memory (0 to 1) held for loads"),
    LOST_BLOCKS: Metric("counter", "Blocks that the GPU evicted while they waited to be stored in host memory"),
    ATTACHED: Metric("gauge", "1 while the engine has host memory of the node service, 0 while it has none"),
    ATTACH_STATE: Metric(
        "info",
        "Whether the engine is attached to the node service and shares its blocks, and why not, in the labels of the "
        "series with the value 1",
        labelnames=("state", "refusal", "sharing"),
    ),
    SESSIONS_LOST: Metric("counter", "Sessions with the node service that have ended while the engine was running"),
    INFO: Metric(
        "info",
        "Configuration of the host memory, in the labels of the series with the value 1",
        labelnames=("cpu_num_chunks", "cpu_blocks_per_chunk", "cpu_kv_cache_size_bytes", "cpu_kv_cache_size_tokens"),
    ),
}


def read_family(
    stats: EngineStats, slot_bytes: int, slot_tokens: int | None, *, lost_blocks: int = 0
) -> dict[str, Any]:
    """The family's counters, gauges and labels at one moment, by name. Histograms are observed where lookups and
    transfers end. `slot_bytes`: bytes of a slot on all ranks together. `slot_tokens`: tokens in a slot; None with
    several KV groups. `lost_blocks`: see `SchedulerSide.lost_blocks`."""
    values: dict[str, Any] = {"allocation_failure": stats.stores["dropped_cpu_full"], LOST_BLOCKS: lost_blocks}
    for direction in DIRECTIONS:
        ended = stats.transfers.of(direction)
        values[f"{direction}_bytes"] = ended.blocks * slot_bytes
        values[f"{direction}_time"] = ended.seconds.sum
    slots = stats.pool.slots
    used = usage(slots.filling + slots.quarantined, slots.leased, stats.pool.usable_slots)
    return values | used | {INFO: info_labels(stats.pool.capacity_slots, slot_bytes, slot_tokens)}


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """The changes from one result of `read_family` to a later one; `before` is empty at the engine's start."""
    changes: Changes = {}
    for name, value in now.items():
        if FAMILY[name].kind == "counter":
            if grown := value - before.get(name, 0):
                changes[name] = grown
        elif before.get(name) != value:
            changes[name] = value
    return changes


def usage(writing: int, reading: int, usable: int) -> dict[str, float]:
    """The gauges of slots in use, out of the `usable` ones."""
    usable = max(1, usable)
    return {
        "cpu_cache_usage_perc": (writing + reading) / usable,
        "cpu_cache_write_usage_perc": writing / usable,
        "cpu_cache_read_usage_perc": reading / usable,
    }


def info_labels(slots: int, slot_bytes: int, slot_tokens: int | None) -> dict[str, str]:
    tokens = None if slot_tokens is None else slots * slot_tokens
    return dict(zip(FAMILY[INFO].labelnames, (str(slots), "1", str(slots * slot_bytes), str(tokens)), strict=True))


def merge(changes: Changes, later: Mapping[str, Any]) -> None:
    for name, value in later.items():
        if FAMILY[name].kind == "counter":
            changes[name] = changes.get(name, 0) + value
        elif FAMILY[name].kind == "histogram":
            changes[name] = [*changes.get(name, ()), *value]
        else:
            changes[name] = value
