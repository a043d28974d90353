"""When the requests of a trace are due."""

from __future__ import annotations

from dataclasses import dataclass

from kvstow.errors import ConfigError
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    `concurrency`: requests in flight at once; with 1 each is stored before the next looks up. `rate`: requests that
    start per second. `time_scale`: start them by their timestamps, this many times as fast as recorded. With neither
    they start as fast as possible. `drain_seconds`: how long a stop waits for what is in flight. `prefill_rate`: tokens
    per second that the model computes, one request at a time; None: no limit.
    """

    concurrency: int = 1
    rate: float | None = None
    time_scale: float | None = None
    drain_seconds: float = 10.0
    prefill_rate: float | None = None

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise ConfigError("concurrency", self.concurrency, "a whole number, 1 or more")
        for key in ("rate", "time_scale", "prefill_rate"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(key, value, "more than 0")
        if self.rate is not None and self.time_scale is not None:
            raise ConfigError("time_scale", self.time_scale, "either rate or time_scale, not both")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError("drain_seconds", self.drain_seconds, "0 or more seconds")

    def prefill_seconds(self, blocks: int) -> float:
        """How long the model computes so many blocks."""
        return blocks * BLOCK_TOKENS / self.prefill_rate if self.prefill_rate is not None else 0.0

    def due(self, index: int, request: TraceRequest, first: TraceRequest) -> float:
        """Seconds after the start of the replay at which `request`, the trace's `index`th, is due."""
        if self.rate is not None:
            return index / self.rate
        if self.time_scale is not None:
            return (request.timestamp - first.timestamp) / 1000 / self.time_scale
        return 0.0
