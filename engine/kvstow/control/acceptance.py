"""Whether new loads and stores are accepted, and if not, why."""

from __future__ import annotations

from math import inf

from kvstow.status import BypassStatus, DrainMode, Refusal


class Acceptance:
    """What operators have switched off (drain, bypass), and what the engine itself cannot serve. Not locked."""

    def __init__(self) -> None:
        self.drain_mode: DrainMode | None = None
        self.drain_deadline = inf
        self.serving = False
        """Every rank can copy and no transfer is stuck."""
        self.rebuilding = False
        """Blocks that a rank has lost are still being removed; nothing is served meanwhile."""
        self.closed = False
        self._bypass_load = self._bypass_store = False
        self._bypass_until = inf

    def set_bypass(self, *, load: bool, store: bool, until: float) -> None:
        self._bypass_load, self._bypass_store, self._bypass_until = load, store, until

    def bypass(self, now: float) -> BypassStatus:
        if now >= self._bypass_until:
            return BypassStatus(load=False, store=False, ttl_seconds_left=None)
        left = None if self._bypass_until == inf else self._bypass_until - now
        return BypassStatus(self._bypass_load, self._bypass_store, left)

    def load_refusal(self, now: float) -> Refusal | None:
        if self.drain_mode == "all" or self.closed:
            return "draining"
        if not self.serving or self.rebuilding:
            return "not_ready"
        return "bypassed" if self._bypass_load and now < self._bypass_until else None

    def store_refusal(self, now: float) -> Refusal | None:
        if self.drain_mode or self.closed:
            return "draining"
        if not self.serving or self.rebuilding:
            return "not_ready"
        return "bypassed" if self._bypass_store and now < self._bypass_until else None
