"""How a session uses the fleet tier."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvstow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How a session uses the tier. Times are in seconds.

    `deadline`: the longest that a request waits for its fetches; it never waits longer than computing the blocks would
    take. `lookup_wait`: the longest that it waits to hear what the store has. `prefill_rate`: tokens per second, if the
    host knows it (`BreakEven`). `replicated`: all ranks hold the same bytes.
    """

    deadline: float = 2.0
    lookup_wait: float = 0.02
    prefill_rate: float | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        for name in ("deadline", "lookup_wait"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "more than 0 seconds")
        if self.prefill_rate is not None and not 0 < self.prefill_rate < inf:
            raise ConfigError("prefill_rate", self.prefill_rate, "more than 0 tokens per second")
