"""Drain and bypass of a host whose pools come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import inf
from threading import Lock

from kvstow.control.acceptance import PoolAcceptance
from kvstow.control.administration import Administrator, check_deadline, check_ttl
from kvstow.status import BypassStatus, DrainMode, DrainStatus


class HostSwitches:
    """Switches all pools of a host, and those that are made later: call `apply_to` with each new pool once it is among
    those of `admins`. Offers what an `Administrator` offers for one pool. Every call is safe from any thread.

    A switch of the host replaces those of single pools, and ending it ends theirs.
    """

    def __init__(
        self, admins: Callable[[], Iterable[Administrator]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admins, self._clock = admins, clock
        self._state = PoolAcceptance()
        self._lock = Lock()

    def drain(self, mode: DrainMode, deadline_seconds: float | None) -> DrainStatus:
        """See `Administrator.drain`."""
        check_deadline(deadline_seconds)
        with self._lock:
            deadline = inf if deadline_seconds is None else self._clock() + deadline_seconds
            for admin in self._admins():
                admin.drain(mode, deadline_seconds)
            self._state.drain_mode, self._state.drain_deadline = mode, deadline
        return self.drain_status

    def undrain(self) -> DrainStatus:
        with self._lock:
            self._state.drain_mode, self._state.drain_deadline = None, inf
            for admin in self._admins():
                admin.undrain()
        return self.drain_status

    @property
    def drain_status(self) -> DrainStatus:
        """Of the host; what is in flight in all pools."""
        pools = [admin.drain_status for admin in self._admins()]
        pending, leases = sum(one.pending_transfers for one in pools), sum(one.leases for one in pools)
        with self._lock:
            mode, deadline = self._state.drain_mode, self._state.drain_deadline
            left = None if deadline == inf else max(0.0, deadline - self._clock())
        active = mode is not None
        return DrainStatus(active, mode, left, active and not pending and not leases, pending, leases)

    def set_bypass(self, *, load: bool, store: bool, ttl_seconds: float | None) -> BypassStatus:
        """See `Administrator.set_bypass`."""
        check_ttl(ttl_seconds)
        with self._lock:
            until = inf if ttl_seconds is None else self._clock() + ttl_seconds
            for admin in self._admins():
                admin.set_bypass(load=load, store=store, ttl_seconds=ttl_seconds)
            self._state.set_bypass(load=load, store=store, until=until)
        return self.bypass

    @property
    def bypass(self) -> BypassStatus:
        with self._lock:
            return self._state.bypass(self._clock())

    def apply_to(self, admin: Administrator) -> None:
        """Switch a new pool as the others."""
        with self._lock:
            now = self._clock()
            bypass = self._state.bypass(now)
            if bypass.load or bypass.store:
                admin.set_bypass(load=bypass.load, store=bypass.store, ttl_seconds=bypass.ttl_seconds_left)
            if self._state.drain_mode is not None:
                deadline = self._state.drain_deadline
                admin.drain(self._state.drain_mode, None if deadline == inf else max(0.0, deadline - now))
