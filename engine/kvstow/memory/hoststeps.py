"""The steps of the pool's host, and the register calls that the host's thread makes between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from kvstow.errors import KvstowError
from kvstow.memory.callbudget import CallBudget
from kvstow.memory.callqueue import Call, CallQueue, MadeCall

HostState = Literal["starting", "idle", "stepping", "waiting"]
"""`waiting`: the host has launched a step, and its device has not finished it."""

IDLE_SECONDS = 0.02  # after a launch: the host has no work, or waits for its device
_LAUNCH_SECONDS = 0.25  # a step that takes longer to launch was abandoned
_LOOK_SECONDS = 0.2  # until the pinning thread looks whether the host still makes steps; each look costs a handover


class Work(Protocol):
    """What the device has to do for a step; a `Fence` is one."""

    def query(self) -> bool:
        """Whether it is finished. Does not wait."""


class HostSteps:
    """Tracks what the host is doing, and lets its thread make calls that hold a lock of the driver.

    If another thread makes such a call, the host waits for the lock and for being woken at each launch: eager steps
    took 1.2 to 1.4 times as long. So while the host makes steps, its own thread makes the call, right after a launch.
    That costs the time of the call, or nothing if the host would have waited for its device.

    How many calls it makes depends on what they cost its steps (`CallBudget`). It makes them without waking the
    pinning thread, which would cost it a handover of the interpreter, 0.5 to 0.9 ms, for each.

    The host's thread calls `begin` before it gives a step's work to the device, `launched` after it, and `end` last; a
    step that ends without `launched` had no work for the device. Without calls each takes about a microsecond and no
    lock. The pinning thread calls `offer`, `withdraw`, `wait` and `run`; any thread may call everything else.

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
        self.looks = 0
        """How often the pinning thread woke in `wait`."""
        self.budget = CallBudget()
        self._expected = 0.0
        self._queue: CallQueue | None = None

    def begin(self) -> None:
        """The host begins to launch the work of a step."""
        self.is_starting = False
        self._begun = self._clock()
        self._is_launching = True

    def launched(self, work: Work | None = None) -> None:
        """The device has the step's work; `work` tells whether it has finished. Makes the next call that is offered, if
        the steps since the last call have paid for it. Raises nothing but a signal handler's exception, which
        interrupts the host anyway."""
        now = self._clock()
        budget, expected, queue = self.budget, self._expected, self._queue
        if self._launched is not None:
            budget.end_step(now - self._launched, expected)
        self._launched, self._work = now, work
        if queue is not None and not self._is_closed and budget.allows(expected):
            try:
                if queue.claim():
                    num_bytes = queue.make()
                    made = self._clock()
                    queue.by_host.append(MadeCall(num_bytes, made - now))
                    budget.spend(made - now, expected)
                    now = made
                    queue.done()
            except BaseException:
                queue.abandon()  # the pinning thread waits for this
                raise
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

    def idle_seconds(self, now: float) -> float:
        """How long ago its last step was launched; endless before the first."""
        return float("inf") if self._idle_from is None else now - self._idle_from

    def offer(self, queue: CallQueue, seconds: float) -> None:
        """Let the host's thread make these calls, each expected to take `seconds`, until `withdraw`."""
        self._expected = seconds
        self._queue = queue

    def withdraw(self) -> None:
        """The host's thread begins no further call."""
        self._queue = None

    def wait(self, queue: CallQueue, wake_at: int) -> bool:
        """Whether the host makes steps, so its thread makes the calls. If it does, returns once `wake_at` of them have
        been made, the queue is held or over, or the host makes no more steps."""
        if self.state(self._clock()) != "stepping":
            return False
        while not queue.has_reached(wake_at) and self.state(self._clock()) == "stepping":
            queue.wait(wake_at, _LOOK_SECONDS)
            self.looks += 1
        return True

    def run(self, call: Callable[[], None], num_bytes: int, seconds: float) -> float | None:
        """Make `call`, expected to take `seconds`: on the host's thread while it makes steps, else on this one. Returns
        after the call: its duration on the host's thread, or None. Raises what the call raised, and `PinError` if the
        host's thread was interrupted during it."""
        queue = CallQueue()
        queue.add([Call(call, num_bytes)])
        self.offer(queue, seconds)
        try:
            while not queue.is_over:
                if self.wait(queue, 1):
                    continue
                if not queue.claim():
                    break  # the host's thread makes it
                try:
                    queue.make()
                finally:
                    queue.done()
        finally:
            self.withdraw()
            queue.settle()
        queue.raise_error()
        return queue.by_host[0].seconds if queue.by_host else None
