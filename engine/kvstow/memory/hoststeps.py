"""What the pool's host is doing, and the register calls that the host's thread makes between its steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from math import hypot, sqrt
from statistics import median
from typing import Literal, NamedTuple, Protocol

from kvstow.errors import KvstowError, PinError

_MOST_SLOWDOWN = 0.045
"""Calls may make the host's steps longer by this fraction, on average."""
_FREE_COST = 0.3
"""A call costs the host nothing if its steps become longer by less than this fraction of the call's duration."""
_FREE_COMPARISONS = 5
"""A cost below `_FREE_COST` counts only after this many comparisons in a row."""
_FIRST_SHARE = 0.035
"""The first share of the host's time: 1.4 GiB/s if a call of 64 MiB takes 1.45 ms."""
_LEAST_SHARE = 0.02
"""The share never falls below this, so that a pool of a busy host still grows."""
_MOST_SHARE = 0.3
"""The share never exceeds this, even if calls cost the host nothing."""
_WEIGHT = 0.5
"""The weight of one comparison in the moving average of the cost, if the comparison has no error."""
_SAMPLES = 16
"""How many steps with a call, and how many without one, make a comparison."""
_ERROR_OF_MEDIAN = 1.25 * 1.48 / sqrt(_SAMPLES)
"""The standard error of the median of normal samples, in median absolute deviations. A few long steps change neither
the median nor this deviation."""
_LESS_THAN_HALF = 0.44
"""Where calls are felt, at most this fraction of the steps has one, so that the median step has none."""
_MOST_IN_A_ROW = 31
"""After this many steps with a call comes one without, for the comparison."""
_MOST_CHARGED = 2
"""A call is charged at most this many times its expected duration. One of 100 ms was a stall of the machine, for which
later steps need not pay."""

_CHECK_SECONDS = 0.1
"""The pause between two checks whether the thread that has claimed a call was interrupted."""
IDLE_SECONDS = 0.02
"""When the last launch is longer ago than this, the host has no work or waits for its device."""
_LAUNCH_SECONDS = 0.25
"""A step that takes longer to launch was abandoned."""
_CHECK_HOST_SECONDS = 0.2
"""The pause between two checks of the pinning thread whether the host still makes steps. Each check costs the host a
handover of the interpreter."""


class CallBudget:
    """Decides after each step of the host whether the host's thread may make a call.

    A call has a fixed cost of about 0.25 ms, so calls always have their full size, and the budget decides how often one
    is made. It measures what calls cost: it compares the steps that had a call with those that had none. Calls may make
    the host 4.5 % slower. A host that launches without a pause feels each call in full, so it spends 4.5 % of its time
    on calls. A host that waits for its device after each launch does not notice them, so it spends up to 30 %. A busy
    host spends at least 2 %, so that its pool still grows.

    If a call takes more than 4.5 % of a step and the host feels it, fewer than half of the steps have a call. The
    median step then has none. Otherwise 31 of 32 steps may have one, and are compared with the step that has none.

    The durations of an eager host's steps may differ by more than a call takes. The larger the error of a comparison,
    the less it changes the cost.

    Not locked. Only the host's thread uses it, but any thread may read `share` and `cost`. O(1) for a step.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE
        """The fraction of its time that the host may spend on calls."""
        self.cost = 1.0
        """The measured cost of a call: how much longer it makes a step, in durations of the call."""
        self._free_in_a_row = 0
        """How many comparisons in a row have found no cost."""
        self._credit = 0.0
        """Seconds of calls that the steps have paid for and that were not spent."""
        self._spent = 0.0
        """Seconds of the call since the last step, or 0."""
        self._in_a_row = 0
        """How many steps in a row had a call."""
        self._with_call: deque[float] = deque(maxlen=_SAMPLES)
        self._without_call: deque[float] = deque(maxlen=_SAMPLES)
        self._calls: deque[float] = deque(maxlen=_SAMPLES)

    def end_step(self, seconds: float, expected: float) -> None:
        """Record that a step took `seconds`, including a call since the end of the last step. The next call is expected
        to take `expected` seconds."""
        if self._spent:
            self._with_call.append(seconds)
            self._calls.append(self._spent)
            self._in_a_row += 1
        else:
            self._without_call.append(seconds)
            self._in_a_row = 0
        step = max(0.0, seconds - self._spent)
        self._spent = 0.0
        earned = step * self.share
        if expected > step * _MOST_SLOWDOWN and self._free_in_a_row < _FREE_COMPARISONS:
            earned = min(earned, expected * _LESS_THAN_HALF)
        # The credit never exceeds one call: many calls must not follow a pause of the host.
        self._credit = min(self._credit + earned, expected)
        if len(self._with_call) == len(self._without_call) == _SAMPLES:
            self._compare()

    def allows(self, expected: float) -> bool:
        """Whether the host may make a call of `expected` seconds now. A credit for half of the call is enough, because
        the durations of steps and calls are estimates. Later steps pay for the rest."""
        return self._credit >= expected / 2 and self._in_a_row < _MOST_IN_A_ROW

    def spend(self, seconds: float, expected: float) -> None:
        """Charge a call that took `seconds` and was expected to take `expected`. A very slow call is charged in part
        only: on a machine that sometimes stalls for 100 ms, full charges delayed the next call by up to 5 s."""
        self._spent = seconds
        self._credit -= min(seconds, _MOST_CHARGED * expected)

    def _compare(self) -> None:
        call = median(self._calls)
        cost = (median(self._with_call) - median(self._without_call)) / call
        error = _ERROR_OF_MEDIAN * hypot(_deviation(self._with_call), _deviation(self._without_call)) / call
        # A higher cost would not lower the share any further.
        cost = min(max(cost, 0.0), _MOST_SLOWDOWN / _LEAST_SHARE)
        self._free_in_a_row = self._free_in_a_row + 1 if cost + error < _FREE_COST else 0
        self.cost += (cost - self.cost) * _WEIGHT / (1 + error * error)
        self.share = min(_MOST_SLOWDOWN / max(self.cost, _MOST_SLOWDOWN), _MOST_SHARE)
        for samples in (self._with_call, self._without_call, self._calls):
            samples.clear()


def _deviation(samples: Collection[float]) -> float:
    """Return the median absolute deviation."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


class RegisterCall(NamedTuple):
    """A call that registers or unregisters `num_bytes`."""

    make: Callable[[], None]
    num_bytes: int


class MadeCall(NamedTuple):
    """A call of `num_bytes` that took the host's thread `seconds`."""

    num_bytes: int
    seconds: float


class CallQueue:
    """Calls that are made in their order. Each is made at most once, by the thread that claims it first. After a call
    that fails, no other is made.

    The pinning thread adds calls, and settles the queue at the end. The pinning thread and the host's thread claim and
    make the calls. Any thread may hold or stop the queue. Claiming, making and waking allocate nothing, so they cannot
    fail once a call has been made.
    """

    def __init__(self) -> None:
        self.made = 0
        """How many calls have succeeded. They are the first ones of the queue."""
        self.error: Exception | None = None
        """The error of the call that failed."""
        self.is_held = False
        """No call begins until `hold(False)`."""
        self.is_stopped = False
        """No call begins any more."""
        self.by_host: deque[MadeCall] = deque()
        """Calls that the host's thread has made. The pinning thread takes them out."""
        self._calls: list[RegisterCall] = []
        self._wake_at = 0
        self._is_abandoned = False
        self._turn, self._wake = threading.Lock(), threading.Lock()
        self._wake.acquire()

    def __len__(self) -> int:
        """How many calls were added, including those that have been made."""
        return len(self._calls)

    @property
    def is_over(self) -> bool:
        """Whether no call will begin unless more are added."""
        return self.made == len(self._calls) or self.is_over_for_good

    @property
    def is_over_for_good(self) -> bool:
        """Whether no call will begin any more: the queue was stopped or abandoned, or a call has failed."""
        return self.is_stopped or self._is_abandoned or self.error is not None

    def add(self, calls: Iterable[RegisterCall]) -> None:
        """Put the calls at the end of the queue."""
        self._calls.extend(calls)

    def claim(self) -> bool:
        """Claim the next call. Returns True if the calling thread now has to `make` it, and then to call `done`."""
        if not self._turn.acquire(blocking=False):
            return False
        if self.is_held or self.is_over:
            self._turn.release()
            return False
        return True

    def make(self) -> int:
        """Make the call that this thread has claimed. Returns the call's bytes. Raises only what interrupts the thread,
        such as a signal handler's exception: an error of the call itself ends the queue."""
        call = self._calls[self.made]
        try:
            call.make()
        except Exception as error:  # noqa: BLE001 - `raise_error` raises it on the pinning thread
            self.error = error
        else:
            self.made += 1
        return call.num_bytes

    def done(self) -> None:
        """End the claim. Wakes the thread in `wait` if enough calls have been made."""
        self._turn.release()
        if self.made >= self._wake_at or self.is_over:
            self._release()

    def abandon(self) -> None:
        """Record that the host's thread was interrupted while it had a claim, or shortly before or after."""
        self._is_abandoned = True
        self._release()

    def hold(self, is_held: bool) -> None:
        """Begin no further call until `hold(False)`."""
        self.is_held = is_held
        if is_held:
            self._release()

    def stop(self) -> None:
        """Begin no further call. Idempotent."""
        self.is_stopped = True
        self._release()

    def wait(self, wake_at: int, seconds: float) -> None:
        """Wait for at most `seconds` until `wake_at` calls have been made, or the queue is held or over."""
        self._wake_at = wake_at
        self._wake.acquire(blocking=False)  # an earlier wait may have left it released
        if not self.has_reached(wake_at):
            self._wake.acquire(timeout=seconds)

    def has_reached(self, wake_at: int) -> bool:
        """Whether `wake_at` calls have been made, or the queue is held or over."""
        return self.made >= wake_at or self.is_held or self.is_over

    def settle(self) -> int:
        """Stop the queue and wait for a call under way. Returns how many calls have succeeded."""
        self.is_stopped = True
        while not self._is_abandoned and not self._turn.acquire(timeout=_CHECK_SECONDS):
            pass
        return self.made

    def raise_error(self) -> None:
        """Raise the error of the call that failed, or `PinError` if the host's thread was interrupted."""
        if self.error is not None:
            raise self.error
        if self._is_abandoned:
            raise PinError("driver", "the host's thread was interrupted during a register call")

    def _release(self) -> None:
        with suppress(RuntimeError):  # the lock is released already
            self._wake.release()


HostState = Literal["starting", "idle", "stepping", "waiting"]
"""What the host is doing. A `waiting` host has launched a step that its device has not finished."""


class Work(Protocol):
    """The work of a step on the device, such as a `Fence`."""

    def query(self) -> bool:
        """Whether the work has finished. Does not wait."""


class HostSteps:
    """Tracks what the host is doing, and lets its thread make calls that hold a lock of the driver.

    If another thread makes such a call, the host waits at each launch for the lock and for being woken: eager steps
    took 1.2 to 1.4 times as long. So while the host makes steps, its own thread makes the call, right after a launch.
    That costs the time of the call, or nothing if the host would have waited for its device.

    `CallBudget` decides how often the host's thread makes a call. It does not wake the pinning thread for each, because
    that would cost it a handover of the interpreter (0.5 to 0.9 ms).

    The host's thread calls `begin` before it launches a step's work, `launched` after that, and `end` last. A step that
    ends without `launched` had no work for the device. Each of the three takes about a microsecond if it makes no call,
    and takes no lock. The pinning thread calls `offer`, `withdraw`, `wait` and `run`. Any thread may call the others.

    A host that never begins a step counts as idle once it has started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        """The clock of all times here, in seconds."""
        self.is_starting = False
        """The host makes no steps yet, but it is not idle either."""
        self.is_pinning = False
        """The pool grows or shrinks. Meanwhile the host passes the work of its steps. The pinning thread sets this."""
        self._is_closed = False
        self._is_launching = False
        self._begin_time: float | None = None
        """When the host last began to launch."""
        self._launch_time: float | None = None
        """When the host last ended a launch. A call may have followed."""
        self._idle_since: float | None = None
        """When that call ended, or the launch if there was no call."""
        self._work: Work | None = None
        """The work of the last step, until it has finished."""
        self.checks = 0
        """How often the pinning thread has woken up in `wait`."""
        self.budget = CallBudget()
        self._expected_seconds = 0.0
        """The expected duration of the next call."""
        self._queue: CallQueue | None = None

    def begin(self) -> None:
        """The host begins to launch the work of a step."""
        self.is_starting = False
        self._begin_time = self.clock()
        self._is_launching = True

    def launched(self, work: Work | None = None) -> None:
        """The device has the work of a step, and `work` says whether it has finished. Makes the next offered call if
        the steps since the last call have paid for it. Raises only a signal handler's exception, which interrupts the
        host anyway."""
        now = self.clock()
        budget, expected, queue = self.budget, self._expected_seconds, self._queue
        if self._launch_time is not None:
            budget.end_step(now - self._launch_time, expected)
        self._launch_time, self._work = now, work
        if queue is not None and not self._is_closed and budget.allows(expected):
            try:
                if queue.claim():
                    num_bytes = queue.make()
                    made = self.clock()
                    queue.by_host.append(MadeCall(num_bytes, made - now))
                    budget.spend(made - now, expected)
                    now = made
                    queue.done()
            except BaseException:
                queue.abandon()  # otherwise the pinning thread would wait for the end of this call
                raise
        self._is_launching = False
        self._idle_since = now

    def end(self) -> None:
        """The step has ended, with or without work for the device."""
        self._is_launching = False

    def close(self) -> None:
        """Begin no further call on the host's thread."""
        self._is_closed = True
        self._work = None

    def state(self, now: float) -> HostState:
        """Return what the host is doing at the time `now`. Only the pinning thread calls this."""
        if self.is_starting:
            return "starting"
        if self._is_closed:
            return "idle"
        begin_time, idle_since = self._begin_time, self._idle_since
        if self._is_launching and begin_time is not None and now - begin_time < _LAUNCH_SECONDS:
            return "stepping"
        if idle_since is not None and now - idle_since < IDLE_SECONDS:
            return "stepping"
        return "waiting" if self._is_device_busy() else "idle"

    def is_idle(self) -> bool:
        """Whether the host has nothing to do now. Any thread of the pool may call this."""
        return self.state(self.clock()) == "idle"

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
        """Return the seconds since the last launch, or infinity before the first."""
        return float("inf") if self._idle_since is None else now - self._idle_since

    def offer(self, queue: CallQueue, seconds: float) -> None:
        """Let the host's thread make these calls until `withdraw`. The next call is expected to take `seconds`."""
        self._expected_seconds = seconds
        self._queue = queue

    def withdraw(self) -> None:
        """Let the host's thread begin no further call."""
        self._queue = None

    def wait(self, queue: CallQueue, wake_at: int) -> bool:
        """Wait while the host makes steps, until its thread has made `wake_at` calls, or the queue is held or over.
        Returns False at once if the host makes no steps."""
        if self.state(self.clock()) != "stepping":
            return False
        while not queue.has_reached(wake_at) and self.state(self.clock()) == "stepping":
            queue.wait(wake_at, _CHECK_HOST_SECONDS)
            self.checks += 1
        return True

    def run(self, call: Callable[[], None], num_bytes: int, seconds: float) -> float | None:
        """Make `call`, which is expected to take `seconds`, and wait for its end. The host's thread makes it while the
        host makes steps; otherwise this thread does. Returns its duration if the host's thread has made it, else None.

        Raises the error of the call, or `PinError` if the host's thread was interrupted during the call.
        """
        queue = CallQueue()
        queue.add([RegisterCall(call, num_bytes)])
        self.offer(queue, seconds)
        try:
            while not queue.is_over:
                if self.wait(queue, 1):
                    continue
                if not queue.claim():
                    break  # the host's thread has claimed the call
                try:
                    queue.make()
                finally:
                    queue.done()
        finally:
            self.withdraw()
            queue.settle()
        queue.raise_error()
        return queue.by_host[0].seconds if queue.by_host else None
