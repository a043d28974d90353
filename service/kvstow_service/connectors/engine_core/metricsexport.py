"""KVStow in vLLM's own `/metrics` and log: the family `vllm:kv_offload_*`.

The scheduler side polls a `StatsFeed` in every step. vLLM sends the `KVStowStats` to its front end, where
`KVStowPromMetrics` exports them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstow.stats import DIRECTIONS
from kvstow_service.connectors.engine_core.offloadmetrics import FAMILY, PREFIX, changes_between, merge

logger = logging.getLogger("kvstow.vllm")

_PERIOD = 0.1
"""How many seconds pass between two readings of the counters."""


@dataclass
class KVStowStats(KVConnectorStats):
    """Changes of the engine's counters. `data` is `Changes`: plain values by name within the family."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStowStats:
        """Add the later changes of `other`, which may come from either half of the connector."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The changes for vLLM's log: histograms as count and sum, without the configuration."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if FAMILY[name].kind == "histogram":
                reduced |= {f"{name}_count": len(value), f"{name}_sum": sum(value)}
            elif FAMILY[name].kind != "info":
                reduced[name] = value
        return reduced

    def is_empty(self) -> bool:
        return not self.data


_SIZES = frozenset(f"{direction}_size" for direction in DIRECTIONS)
"""The histograms that are observed when a transfer ends."""


class StatsFeed:
    """Turns counters into the changes that vLLM asks for, which it does twice a step. Used by the scheduler's thread.

    Reading the counters takes 22 us, so they are read ten times a second. They are also read when the last transfer has
    ended, because vLLM may make no further step after that. A transfer that begins and ends between two calls is known
    by its size, which is observed at its end.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: the family's counters, gauges and labels now, by name. `is_busy`: whether transfers are open."""
        self._read, self._is_busy, self._clock = read, is_busy, clock
        self._due = clock()
        self._was_busy = False
        self._last: dict[str, Any] = {}
        self._observed: dict[str, list[float]] = {}

    def observe(self, name: str, value: float) -> None:
        self._observed.setdefault(name, []).append(value)

    def take_stats(self) -> KVStowStats | None:
        """The changes since the last reading, or since the engine's start. None if there are none, or if the next
        reading is not due yet."""
        now, is_busy = self._clock(), self._is_busy()
        has_ended = not is_busy and (self._was_busy or not _SIZES.isdisjoint(self._observed))
        self._was_busy = is_busy
        if now < self._due and not has_ended:
            return None
        self._due = now + _PERIOD
        values = self._read()
        changes = changes_between(self._last, values) | self._observed
        self._last, self._observed = values, {}
        return KVStowStats(data=changes) if changes else None


class KVStowPromMetrics(KVConnectorPromMetrics):
    """Registers the family with the metric classes that vLLM passes.

    It registers at the first step, not in the constructor. Under MultiConnector, an OffloadingConnector may have
    registered the same names by then, and children do not know of each other. It keeps those names; KVStow's own
    `/metrics` has all figures.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] | None = None
        self._info: dict[tuple[int, str], list[str]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self._metrics is None:
            self._metrics = self._register()
        for name, value in transfer_stats_data.items():
            if name not in self._metrics:
                continue
            child = self._child(name, engine_idx)
            match FAMILY[name].kind:
                case "counter":
                    child().inc(value)
                case "gauge":
                    child().set(value)
                case "histogram":
                    series = child()
                    for observation in value:
                        series.observe(observation)
                case "info":  # a new series for new labels; the former one becomes 0
                    labels = [value[label] for label in FAMILY[name].labelnames]
                    if (former := self._info.get((engine_idx, name))) is not None:
                        child(*former).set(0)
                    child(*labels).set(1)
                    self._info[engine_idx, name] = labels

    def _child(self, name: str, engine_idx: int) -> Callable[..., Any]:
        """Makes the series of an engine, given the metric's own labels."""
        assert self._metrics is not None
        return partial(self._metrics[name].labels, *self.per_engine_labelvalues[engine_idx])

    def _register(self) -> dict[str, Any]:
        """The metrics of the family, up to the first name that another connector has registered. Every counter exists
        before its first increment, so that rates include that increment."""
        metrics: dict[str, Any] = {}
        for name, metric in FAMILY.items():
            labels = [*self._labelnames, *metric.labelnames]
            given: dict[str, Any] = {"name": PREFIX + name, "documentation": metric.help, "labelnames": labels}
            try:
                if metric.kind == "counter":
                    metrics[name] = self._counter_cls(**given)
                    for values in self.per_engine_labelvalues.values():
                        metrics[name].labels(*values)
                elif metric.kind == "histogram":
                    metrics[name] = self._histogram_cls(**given, buckets=metric.bounds)
                else:
                    metrics[name] = self._gauge_cls(**given, multiprocess_mode="mostrecent")
            except ValueError as error:
                logger.warning("another connector exports %s%s, so KVStow does not: %s", PREFIX, name, error)
                break
        return metrics
