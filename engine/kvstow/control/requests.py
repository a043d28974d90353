"""The requests that use a pool's blocks, and what the pool learns from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from kvstow.control.chains import Chains, Running, ignore
from kvstow.control.contexts import Contexts
from kvstow.control.curve import Curve
from kvstow.control.recording import Recording
from kvstow.control.shares import Shares
from kvstow.endings import Ending, Endings

_ENDS_AT_ONCE = 16
"""How many requests of ended sessions are ended while the lock is held once."""
INTERRUPTED = Ending("interrupted")


class Requests:
    """The requests of a pool's sessions, from their admission to their end. Used with the pool's lock held, except
    where a method says otherwise."""

    def __init__(self, chains: Chains, lock: Lock, clock: Callable[[], float], *, has_curve: bool) -> None:
        self._chains, self._lock, self._clock = chains, lock, clock
        self.curve = Curve(chains.hazards, lock, clock) if has_curve else None
        self.endings = Endings()
        self.contexts = Contexts()
        self.shares = Shares()
        self.recording: Recording | None = None
        """Receives every use of blocks. None while there is no recording."""
        self.left: deque[Running] = deque()
        """Requests of ended sessions that `end_left` has not ended yet."""

    def end(self, running: Running, ending: Ending, more: Sequence[bytes] = ()) -> None:
        """Note that a request has ended. `more`: keys at the end of its chain that were not known at its admission.
        O(parts of its chain)."""
        state, has_changed = self.endings.state_of(ending)
        if has_changed:
            self._chains.hazards.forget(state)
        now = self._clock()
        self._chains.end(running, state, now)
        if self.curve is not None:
            self.curve.end(running, more, state, now)
        # Its parts live on. The garbage collector does not visit the list that holds them, so a part that led back to
        # the session, and so to the pool, would keep a pool that has ended in memory.
        running.on_incomplete = ignore

    def end_left(self) -> bool:
        """End some of the requests that sessions have left. Returns False if none are left. The caller does not hold
        the lock."""
        with self._lock:
            for _ in range(min(len(self.left), _ENDS_AT_ONCE)):
                self.end(self.left.popleft(), INTERRUPTED)
            return bool(self.left)
