"""The metrics `vllm:kv_offload_*` that vLLM's dashboards know, filled from the engine's counters.

Those that the engine cannot tell truly are left out: `lookup_async_delay_seconds` (no look-up is deferred),
`cpu_allocation_size` and `stores_skipped` (there is no reuse threshold).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from kvstow.control.counters import Counters
from kvstow.stats import EngineStats, HistogramSnapshot

PREFIX = "vllm:kv_offload_"
INFO = "config_info"

Changes = dict[str, Any]
"""By name within the family: how much a counter grew, what a gauge is now, what a histogram observed (a list), the
labels of the info metric (a mapping)."""


class Metric(NamedTuple):
    """`labelnames` come after those that vLLM gives every metric."""

    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    bounds: tuple[float, ...] = ()
    labelnames: tuple[str, ...] = ()


_TRANSFER_TYPE = ("transfer_type",)
_SIZES = Counters().transfer_size["load"].snapshot().bounds
_DELAYS = Counters().lookup_seconds.snapshot().bounds

FAMILY: dict[str, Metric] = {
    "load_bytes": Metric("counter", "Bytes loaded from host memory to GPUs, of all ranks"),
    "load_time": Metric("counter", "Time of loads from host memory to GPUs in seconds, each of its slowest rank"),
    "load_size": Metric("histogram", "Bytes of a load on one rank", _SIZES),
    "store_bytes": Metric("counter", "Bytes stored from GPUs to host memory, of all ranks"),
    "store_time": Metric("counter", "Time of stores from GPUs to host memory in seconds, each of its slowest rank"),
    "store_size": Metric("histogram", "Bytes of a store on one rank", _SIZES),
    "lookup_sync_delay_seconds": Metric("histogram", "Time of a look-up in the index of host memory", _DELAYS),
    "allocation_failure": Metric("counter", "Blocks that were not stored because host memory had no room for them"),
    "cpu_cache_usage_perc": Metric("gauge", "Share of host memory (0 to 1) held by transfers and admitted hits"),
    "cpu_cache_write_usage_perc": Metric("gauge", "Share of host memory (0 to 1) that stores are filling"),
    "cpu_cache_read_usage_perc": Metric("gauge", "Share of host memory (0 to 1) held for loads"),
    INFO: Metric(
        "info",
        "Configuration of the host memory; the series that is 1 counts",
        labelnames=("cpu_num_chunks", "cpu_blocks_per_chunk", "cpu_kv_cache_size_bytes", "cpu_kv_cache_size_tokens"),
    ),
    "total_bytes": Metric("counter", "As load_bytes and store_bytes", labelnames=_TRANSFER_TYPE),
    "total_time": Metric("counter", "As load_time and store_time", labelnames=_TRANSFER_TYPE),
    "size": Metric("histogram", "As load_size and store_size", _SIZES, _TRANSFER_TYPE),
}

DEPRECATED: dict[str, tuple[str, str]] = {
    "load_bytes": ("total_bytes", "CPU_to_GPU"),
    "load_time": ("total_time", "CPU_to_GPU"),
    "load_size": ("size", "CPU_to_GPU"),
    "store_bytes": ("total_bytes", "GPU_to_CPU"),
    "store_time": ("total_time", "GPU_to_CPU"),
    "store_size": ("size", "GPU_to_CPU"),
}
"""The older name of a metric and its label `transfer_type`: dashboards of all versions still read them."""


def watched(stats: EngineStats) -> tuple[object, ...]:
    """Changes with everything that the family tells, and costs far less than a `Reading`."""
    dropped = stats.store_blocks["dropped_cpu_full"]
    return stats.transfer_blocks, stats.lookup_seconds, stats.slots, dropped, stats.capacity_slots


class Reading:
    """One look at the engine's counters, in the family's terms.

    `slot_bytes`: what a slot takes on all ranks together. `slot_tokens`: how many tokens it holds; None where that
    has no one answer (several KV groups).
    """

    def __init__(self, stats: EngineStats, slot_bytes: int, slot_tokens: int | None) -> None:
        self._counters: dict[str, float] = {"allocation_failure": stats.store_blocks["dropped_cpu_full"]}
        self._histograms = {"lookup_sync_delay_seconds": stats.lookup_seconds}
        for direction in ("load", "store"):
            self._counters[f"{direction}_bytes"] = stats.transfer_blocks[direction] * slot_bytes
            self._counters[f"{direction}_time"] = stats.transfer_seconds[direction].total
            self._histograms[f"{direction}_size"] = stats.transfer_size[direction]
        self._states: dict[str, Any] = {**_usage(stats), INFO: _info(stats.capacity_slots, slot_bytes, slot_tokens)}

    def since(self, before: Reading | None) -> Changes:
        """What changed from `before`, or from the engine's start, to this reading. Empty if nothing did."""
        changes: Changes = {
            name: grown for name, value in self._counters.items() if (grown := value - _of(before, name))
        }
        for name, snapshot in self._histograms.items():
            if observed := list(observations(before._histograms[name] if before else None, snapshot)):
                changes[name] = observed
        states = self._states.items()
        return changes | {name: value for name, value in states if before is None or before._states[name] != value}


def _of(reading: Reading | None, name: str) -> float:
    return reading._counters[name] if reading else 0


def _usage(stats: EngineStats) -> dict[str, float]:
    slots, usable = stats.slots, max(1, stats.usable_slots)
    writing = slots.filling + slots.quarantined
    return {
        "cpu_cache_usage_perc": (writing + slots.leased) / usable,
        "cpu_cache_write_usage_perc": writing / usable,
        "cpu_cache_read_usage_perc": slots.leased / usable,
    }


def _info(slots: int, slot_bytes: int, slot_tokens: int | None) -> dict[str, str]:
    tokens = None if slot_tokens is None else slots * slot_tokens
    return dict(zip(FAMILY[INFO].labelnames, (str(slots), "1", str(slots * slot_bytes), str(tokens)), strict=True))


def observations(before: HistogramSnapshot | None, after: HistogramSnapshot) -> Iterator[float]:
    """Values that fall into the same buckets as those observed since `before`, and have the same sum.

    A histogram of prometheus_client takes observations only, and these make it equal to the engine's.
    """
    earlier = before.counts if before else (0,) * len(after.counts)
    counts = [now - then for now, then in zip(after.counts, earlier, strict=True)]
    total = after.total - (before.total if before else 0.0)
    edges = (0.0, *after.bounds, max(total, after.bounds[-1]))
    least = sum(count * low for count, (low, _) in zip(counts, pairwise(edges), strict=True))
    width = sum(count * (high - low) for count, (low, high) in zip(counts, pairwise(edges), strict=True))
    share = min(1.0, max(1e-9, (total - least) / width)) if width else 1.0  # buckets are open below: never at `low`
    for count, (low, high) in zip(counts, pairwise(edges), strict=True):
        for _ in range(count):
            yield min(high, low + share * (high - low))


def merge(changes: Changes, later: Mapping[str, Any]) -> None:
    """Add `later` changes to `changes`."""
    for name, value in later.items():
        if FAMILY[name].kind == "counter":
            changes[name] = changes.get(name, 0) + value
        elif FAMILY[name].kind == "histogram":
            changes[name] = [*changes.get(name, ()), *value]
        else:
            changes[name] = value
