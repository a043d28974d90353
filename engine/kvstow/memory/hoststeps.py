"""The steps of the pool's host, and the register calls that its thread makes between them."""

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

_FELT = 0.045  # of the host's time: by so much its steps may become longer on average
_MOST_OF_STEP = 0.045  # a longer call may be felt by fewer than half of the steps only
_FREE, _FREE_IN_A_ROW = 0.3, 5  # of a call's time: such a cost is none, if that many comparisons in a row find it
_FIRST_SHARE = 0.035  # of the host's time: 1.4 GiB/s, if 64 MiB take 1.45 ms
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.3
_FACTOR = 2  # by which the share changes at most
_MOST_COST = 2.5
_DOWN, _UP = 0.5, 0.25  # of a change of the cost that is believed at once
_SAMPLES = 16  # steps of each kind that are compared
_ERROR_OF_MEDIAN = 1.25 / sqrt(_SAMPLES)  # in standard deviations
_DEVIATION = 1.48  # standard deviations to a median deviation, where the tail of long steps does not count
_FEWER = 0.44  # of the steps: the median step has no call
_IN_A_ROW = 31  # steps with a call, then one without for comparison
_MOST_CHARGED = 2  # times what was expected: a call of 100 ms was a stall of the machine, and no step pays for those


class CallBudget:
    """Decides after each step of the host whether the host may make a call.

    Calls are always of full size: each has a fixed cost of about 0.25 ms. How often one is made depends on what calls
    cost: the budget compares the steps that had a call with those that had none. Calls may make the host 4.5 % slower.
    For a host that is always launching, which feels each call in full, that is a share of 0.045 of its time; a host
    that waits for its device after each launch does not notice them, and the share grows up to 0.3. It never falls
    below 0.02, so that a busy host still gets its pool.

    Where a call takes more than 4.5 % of a step and is felt, fewer than half of the steps have one, so the median step
    has none. Otherwise 31 of 32 may have one, and are compared with the one that has none.

    The steps of an eager host differ by more than a call takes. The less a comparison can tell, the less it changes.

    Not locked: used by the host's thread; any thread may read `share` and `cost`. O(1) for a step.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE
        self.cost = 1.0
        """By how much of a call's time the step becomes longer, as far as the comparisons tell."""
        self._free = 0  # comparisons in a row that found no cost
        self._credit = 0.0
        self._spent = 0.0  # by the call since the last step
        self._in_a_row = 0
        self._with: deque[float] = deque(maxlen=_SAMPLES)
        self._without: deque[float] = deque(maxlen=_SAMPLES)
        self._calls: deque[float] = deque(maxlen=_SAMPLES)

    def end_step(self, seconds: float, expected: float) -> None:
        """A step took `seconds`, including a call made since the last step ended. The next call is expected to take
        `expected` seconds."""
        if self._spent:
            self._with.append(seconds)
            self._calls.append(self._spent)
            self._in_a_row += 1
        else:
            self._without.append(seconds)
            self._in_a_row = 0
        step = max(0.0, seconds - self._spent)
        self._spent = 0.0
        earned = step * self.share
        if expected > step * _MOST_OF_STEP and self._free < _FREE_IN_A_ROW:
            earned = min(earned, expected * _FEWER)
        # No more than one call is saved up: a pause of the host must not be followed by many.
        self._credit = min(self._credit + earned, expected)
        if len(self._with) == len(self._without) == _SAMPLES:
            self._compare()

    def allows(self, expected: float) -> bool:
        """Whether the host may make a call of `expected` seconds now. Half of them is enough, and the rest is owed: the
        estimates of a step and of a call may be a little off."""
        return self._credit >= expected / 2 and self._in_a_row < _IN_A_ROW

    def spend(self, seconds: float, expected: float) -> None:
        """The host has made a call of `seconds`, where `expected` were allowed. One that took unusually long delays the
        next a little: on a machine that stalls for 100 ms now and then, paying for that took up to 5 s of steps."""
        self._spent = seconds
        self._credit -= min(seconds, _MOST_CHARGED * expected)

    def _compare(self) -> None:
        call = median(self._calls)
        found = (median(self._with) - median(self._without)) / call
        error = _ERROR_OF_MEDIAN * hypot(_deviation(self._with), _deviation(self._without)) / call
        found = min(max(found, 0.0), _MOST_COST)
        self._free = self._free + 1 if found + error < _FREE else 0
        # A host that feels nothing is believed sooner than one that feels more than the calls take.
        believed = (_DOWN if found < self.cost else _UP) / (1 + error * error)
        self.cost += (found - self.cost) * believed
        share = _FELT / max(self.cost, _FELT)
        share = min(max(share, self.share / _FACTOR), self.share * _FACTOR)
        self.share = min(max(share, _LEAST_SHARE), _MOST_SHARE)
        for samples in (self._with, self._without, self._calls):
            samples.clear()


def _deviation(samples: Collection[float]) -> float:
    """About a standard deviation."""
    middle = median(samples)
    return _DEVIATION * median(abs(sample - middle) for sample in samples)


_CHECK_SECONDS = 0.1  # between two looks whether a thread that had claimed a call was interrupted


class RegisterCall(NamedTuple):
    make: Callable[[], None]
    num_bytes: int


class MadeCall(NamedTuple):
    """`seconds` on the host's thread."""

    num_bytes: int
    seconds: float


class CallQueue:
    """Calls in their order, each made at most once, by the thread that claims it first. The first that fails is the
    last that is made.

    The pinning thread adds calls, and settles the queue at last. It and the host's thread claim and make them. Any
    thread may stop the queue or hold it. Claiming, making and waking allocate nothing, so they cannot fail once a call
    has been made.
    """

    def __init__(self) -> None:
        self.made = 0  # calls that have succeeded: all before this one, none after it
        self.error: Exception | None = None  # of the call that failed
        self.is_held = self.is_stopped = False  # no call is begun: until `hold(False)`, or for good
        self.by_host: deque[MadeCall] = deque()  # taken by the pinning thread
        self._calls: list[RegisterCall] = []
        self._wake_at = 0
        self._is_abandoned = False
        self._turn, self._wake = threading.Lock(), threading.Lock()
        self._wake.acquire()

    def __len__(self) -> int:
        """All calls, made or not."""
        return len(self._calls)

    @property
    def is_over(self) -> bool:
        """No call will be begun, unless more are added."""
        return self.made == len(self._calls) or self.is_over_for_good

    @property
    def is_over_for_good(self) -> bool:
        """Stopped, failed, or abandoned."""
        return self.is_stopped or self._is_abandoned or self.error is not None

    def add(self, calls: Iterable[RegisterCall]) -> None:
        self._calls.extend(calls)

    def claim(self) -> bool:
        """Whether the calling thread is to make the next call."""
        if not self._turn.acquire(blocking=False):
            return False
        if self.is_held or self.is_over:
            self._turn.release()
            return False
        return True

    def make(self) -> int:
        """Called by the thread that has claimed the call and then calls `done`. Returns the call's bytes. Raises only
        what interrupts that thread, such as a signal handler's exception."""
        call = self._calls[self.made]
        try:
            call.make()
        except Exception as error:  # noqa: BLE001 (raised by `settle`)
            self.error = error
        else:
            self.made += 1
        return call.num_bytes

    def done(self) -> None:
        """Let others claim the next call, and `wait` return if enough calls have been made."""
        self._turn.release()
        if self.made >= self._wake_at or self.is_over:
            self._release()

    def abandon(self) -> None:
        """The host's thread was interrupted between claiming and ending a call, or close to it."""
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
        """Until so many calls have been made, the queue is held, or no further call will be begun; at most so long."""
        self._wake_at = wake_at
        self._wake.acquire(blocking=False)  # for an earlier wait
        if not self.has_reached(wake_at):
            self._wake.acquire(timeout=seconds)

    def has_reached(self, wake_at: int) -> bool:
        """Whether `wait` need not wait."""
        return self.made >= wake_at or self.is_held or self.is_over

    def settle(self) -> int:
        """Stop, and wait for a call under way; how many have succeeded."""
        self.is_stopped = True
        while not self._is_abandoned and not self._turn.acquire(timeout=_CHECK_SECONDS):
            pass
        return self.made

    def raise_error(self) -> None:
        """Raise the error of the call that failed, and `PinError` if the host's thread was interrupted."""
        if self.error is not None:
            raise self.error
        if self._is_abandoned:
            raise PinError("driver", "the host's thread was interrupted during a register call")

    def _release(self) -> None:
        with suppress(RuntimeError):  # it is released already
            self._wake.release()


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
        self.is_starting = False  # the host makes no steps yet, but is not idle either
        self.is_pinning = False
        """Set by the pinning thread while the pool grows or shrinks: the host passes the work of its steps then."""
        self._is_closed = False
        self._is_launching = False
        self._begun: float | None = None  # when it last began to launch
        self._launched: float | None = None  # the last time; a call may follow
        self._idle_from: float | None = None  # after that call
        self._work: Work | None = None  # of the last step
        self.looks = 0  # how often the pinning thread woke in `wait`
        self.budget = CallBudget()
        self._expected = 0.0
        self._queue: CallQueue | None = None

    def begin(self) -> None:
        """The host begins to launch the work of a step."""
        self.is_starting = False
        self._begun = self._clock()
        self._is_launching = True

    def launched(self, work: Work | None = None) -> None:
        """The device has the step's work; `work` reports whether it has finished. Makes the next call that is offered,
        if the steps since the last call have paid for it. Raises nothing but a signal handler's exception, which
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
        queue.add([RegisterCall(call, num_bytes)])
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
