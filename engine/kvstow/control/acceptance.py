"""Whether new loads and stores are accepted, and if not, why."""

from __future__ import annotations

from math import inf

from kvstow.status import BypassStatus, DrainMode, Refusal


class PoolAcceptance:
    """What operators have switched off in a pool (drain, bypass), and whether its blocks can be trusted. Not locked."""

    def __init__(self) -> None:
        self.drain_mode: DrainMode | None = None
        self.drain_deadline = inf
        self.rebuilding = False
        """Blocks that a rank has lost are still being removed; nothing is served meanwhile."""
        self.bypass_load = self.bypass_store = False
        self.bypass_until = inf

    def set_bypass(self, *, load: bool, store: bool, until: float) -> None:
        self.bypass_load, self.bypass_store, self.bypass_until = load, store, until

    def bypasses_load(self, now: float) -> bool:
        return self.bypass_load and now < self.bypass_until

    def bypass(self, now: float) -> BypassStatus:
        if now >= self.bypass_until:
            return BypassStatus(load=False, store=False, ttl_seconds_left=None)
        left = None if self.bypass_until == inf else self.bypass_until - now
        return BypassStatus(self.bypass_load, self.bypass_store, left)


class SessionAcceptance:
    """Whether one session may load and store: what its pool allows, and its own state. Not locked."""

    def __init__(self, pool: PoolAcceptance) -> None:
        self._pool = pool
        self.serving = False
        """Every rank can copy and no transfer is stuck."""
        self.closed = False

    def is_kept_from_loading(self, now: float) -> bool:
        """Whether an operator wants it to load nothing, ready or not."""
        return self._pool.drain_mode == "all" or self._pool.bypasses_load(now)

    def load_refusal(self, now: float) -> Refusal | None:
        pool = self._pool
        if pool.drain_mode == "all" or self.closed:
            return "draining"
        if not self.serving or pool.rebuilding:
            return "not_ready"
        return "bypassed" if pool.bypasses_load(now) else None

    def store_refusal(self, now: float) -> Refusal | None:
        pool = self._pool
        if pool.drain_mode or self.closed:
            return "draining"
        if not self.serving or pool.rebuilding:
            return "not_ready"
        return "bypassed" if pool.bypass_store and now < pool.bypass_until else None
