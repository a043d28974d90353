"""The steps of the pool's host, and the register calls that the host's thread makes between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from kvstow.errors import KvstowError, PinError
from kvstow.memory.callbudget import CallBudget

HostState = Literal["starting", "idle", "stepping", "waiting"]
"""`waiting`: the host has launched a step, and its device has not finished it."""

IDLE_SECONDS = 0.02  # after a launch: the host has no work, or waits for its device
_LAUNCH_SECONDS = 0.25  # a step that takes longer to launch was abandoned


class Work(Protocol):
    """What the device has to do for a step; a `Fence` is one."""

    def query(self) -> bool:
        """Whether it is finished. Does not wait."""


class _Offer:
    """A call, made at most once, by the thread that claims it first. Waiting for it and ending it allocate nothing, so
    they cannot fail once the call has been made."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.seconds: float | None = None
        """Duration of the call, if the host's thread made it."""
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self.is_made = False
        self.error: Exception | None = None

    def claim(self) -> bool:
        return self._claim.acquire(blocking=False)

    def make(self) -> None:
        """Called by the thread that has claimed it. Raises only what interrupts that thread, such as a signal handler's
        exception."""
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 (raised by the thread that made the offer)
            self.error = error
        self.is_made = True

    def end(self) -> None:
        """Let `wait` return. Idempotent."""
        if self._done.locked():
            self._done.release()

    def wait(self, seconds: float) -> bool:
        return self._done.acquire(timeout=seconds)


class HostSteps:
    """Tracks what the host is doing, and lets its thread make calls that hold a lock of the driver.

    If another thread makes such a call, the host waits for the lock and for being woken at each launch: eager steps
    took 1.2 to 1.4 times as long. So while the host makes steps, its own thread makes the call, right after a launch.
    That costs the time of the call, or nothing if the host would have waited for its device.

    How many calls it makes depends on what they cost its steps (`CallBudget`).

    The host's thread calls `begin` before it gives a step's work to the device, `launched` after it, and `end` last; a
    step that ends without `launched` had no work for the device. Without an offer each takes about a microsecond and no
    lock. The pinning thread calls `run`, one call at a time; any thread may call everything else.

    A host that never begins a step counts as idle once it has started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_starting = False
        """The host is starting: it makes no steps yet, but is not idle either."""
        self.is_pinning = False
        """Set by the pinning thread while the pool grows or shrinks: the host passes the work of its steps then."""
        self._is_closed = False
        self._is_launching = False
        self._begun: float | None = None  # when it last began to launch
        self._launched: float | None = None  # the last time; a call may follow
        self._idle_from: float | None = None  # after that call
        self._work: Work | None = None  # of the last step
        self._budget = CallBudget()
        self._expected = 0.0
        self._offer: _Offer | None = None

    def call_seconds(self, most: float) -> float:
        """How long a call should take, at most `most`."""
        return self._budget.call_seconds(most)

    def begin(self) -> None:
        """The host begins to launch the work of a step."""
        self.is_starting = False
        self._begun = self._clock()
        self._is_launching = True

    def launched(self, work: Work | None = None) -> None:
        """The device has the step's work; `work` tells whether it has finished. Makes the offered call, if the steps
        since the last call have paid for it. Raises nothing but a signal handler's exception, which interrupts the host
        anyway."""
        now = self._clock()
        budget, expected, offer = self._budget, self._expected, self._offer
        if self._launched is not None:
            budget.end_step(now - self._launched, expected)
        self._launched, self._work = now, work
        if offer is not None and not self._is_closed and budget.allows(expected):
            try:
                if offer.claim():
                    offer.make()
                    made = self._clock()
                    offer.seconds = made - now
                    budget.spend(offer.seconds)
                    now = made
            finally:
                offer.end()  # even if the host is interrupted: the pinning thread waits for this
        self._is_launching = False
        self._idle_from = now

    def end(self) -> None:
        """The step has ended, with or without work for the device."""
        self._is_launching = False

    def close(self) -> None:
        """Make no more calls on the host's thread, apart from one under way."""
        self._is_closed = True
        self._work = None

    def state(self, now: float) -> HostState:
        """Called by the pinning thread."""
        if self.is_starting:
            return "starting"
        if self._is_closed:
            return "idle"
        begun, idle_from = self._begun, self._idle_from
        if self._is_launching and begun is not None and now - begun < _LAUNCH_SECONDS:
            return "stepping"
        if idle_from is not None and now - idle_from < IDLE_SECONDS:
            return "stepping"
        return "waiting" if self._is_device_busy() else "idle"

    def _is_device_busy(self) -> bool:
        work = self._work
        try:
            if work is None or not work.query():
                return work is not None
        except KvstowError:
            pass  # the thread that waits for the device gets the same error
        if self._work is work:
            self._work = None
        return False

    def run(self, call: Callable[[], None], seconds: float) -> float | None:
        """Make `call`, expected to take `seconds`: on the host's thread while it makes steps, else on this one. Returns
        after the call: its duration on the host's thread, or None. Raises what the call raised, and `PinError` if the
        host's thread was interrupted during it."""
        offer = _Offer(call)
        self._expected = seconds
        self._offer = offer
        try:
            while self.state(self._clock()) == "stepping":
                # A wait that ends without the call costs a host that computes in Python a handover of the interpreter.
                if offer.wait(_LAUNCH_SECONDS if self._is_launching else IDLE_SECONDS):
                    break
            else:
                if offer.claim():
                    offer.make()
                else:
                    offer.wait(-1)
        finally:
            self._offer = None
        if not offer.is_made:
            raise PinError("driver", "the host's thread was interrupted during a register call")
        if offer.error is not None:
            raise offer.error
        return offer.seconds
