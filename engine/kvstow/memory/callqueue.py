"""Register calls that two threads share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from kvstow.errors import PinError

_CHECK_SECONDS = 0.1  # between two looks whether a thread that had claimed a call was interrupted


class Call(NamedTuple):
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
        self.made = 0
        """Calls that have succeeded. All before it are done, none after it."""
        self.error: Exception | None = None
        """Of the call that failed."""
        self.is_held = False
        """No call is begun for as long as it is set. See `hold`."""
        self.is_stopped = False
        """No further call is begun, for good."""
        self.by_host: deque[MadeCall] = deque()
        """Taken by the pinning thread."""
        self._calls: list[Call] = []
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

    def add(self, calls: Iterable[Call]) -> None:
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
        """Begin no further call until told otherwise."""
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
