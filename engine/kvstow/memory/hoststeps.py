"""The steps of the pool's host: what the host does now, and how much longer its steps take beside pinning."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Literal, NamedTuple

HostState = Literal["starting", "idle", "launching", "waiting"]

IDLE_SECONDS = 0.02  # after a launch: the host has no work, or its device is busy for long
_LAUNCH_SECONDS = 0.25  # a step that says for so long nothing of its launch was broken off
_QUIET_EVERY = 8  # one step of so many has no pinning beside it
_SAMPLES = 12  # comparisons that a verdict needs


class _Step(NamedTuple):
    seconds: float
    beside_pinning: bool


def nothing() -> None:
    """Nobody waits for the host."""


class _Pinning:
    """A context: work of pinning goes on beside the host. Leaving it cannot fail."""

    def __init__(self, steps: HostSteps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps.note_pinning(True)

    def __exit__(self, *error: object) -> None:
        self._steps.note_pinning(False)


class HostSteps:
    """Times the host's steps, from launch to launch, and compares them.

    The host's thread calls `begin` before it gives a step's work to the device, `launched` after it, and `end` last: a
    step that ends without a launch had no work for the device, and is not timed. Each call takes about a microsecond
    and no lock. The pinning thread calls everything else. Each field is written by one of the two threads and read as
    a whole by the other, so no lock is needed.

    A host that never begins a step counts as idle, once it has started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_starting = False
        """The host says that it is starting up: it makes no steps yet, but is not idle either."""
        self.on_change: Callable[[], None] = nothing
        """Called by the host's thread when `state` changes while somebody waits for it; must not block."""
        self._is_launching = False
        self._changed: float | None = None  # when it last began or ended to launch
        self._launched: float | None = None  # the step before, unless the host has been idle since
        self._number = 1
        self._steps: deque[_Step | None] = deque(maxlen=_QUIET_EVERY * _SAMPLES + 2)
        self._is_pinning = self._was_pinning = False
        self.pinning = _Pinning(self)
        """The pinning thread works inside of it."""

    # The host's thread.

    def begin(self) -> None:
        """The host begins to launch the work of a step."""
        now = self._clock()
        self.is_starting = False
        if self.state(now) == "idle":
            self._launched = None  # the time says nothing: the host waited for work, or for its device
        self._is_launching, self._changed = True, now
        self.on_change()

    def launched(self) -> None:
        """The device has the work of the step."""
        now = self._clock()
        if self._launched is None:
            self._steps.append(None)
        else:
            self._steps.append(_Step(now - self._launched, self._was_pinning))
        self._launched = now
        self._was_pinning = self._is_pinning
        self._number += 1
        self._is_launching, self._changed = False, now
        self.on_change()

    def end(self) -> None:
        """The step has ended, with or without work for the device."""
        if self._is_launching:
            self._is_launching, self._changed = False, self._clock()
            self.on_change()

    # The pinning thread.

    def state(self, now: float) -> HostState:
        if self.is_starting:
            return "starting"
        if self._changed is None:
            return "idle"
        if self._is_launching:
            return "launching" if now - self._changed < _LAUNCH_SECONDS else "idle"
        return "waiting" if now - self._changed < IDLE_SECONDS else "idle"

    @property
    def is_quiet(self) -> bool:
        """Whether pinning leaves the host alone until its next launch, to compare other steps with this one."""
        return self._number % _QUIET_EVERY == 0

    def note_pinning(self, is_pinning: bool) -> None:
        """Work of pinning begins or ends; `pinning` calls it."""
        self._is_pinning = is_pinning
        self._was_pinning |= is_pinning

    def take_slowdown(self) -> float | None:
        """How many times as long steps take beside pinning as quiet ones between them, in the median of the last few
        comparisons; None until there are enough new ones."""
        steps = list(self._steps)
        ratios = []
        for before, quiet, after in zip(steps, steps[1:], steps[2:], strict=False):
            if quiet and not quiet.beside_pinning and quiet.seconds > 0:
                beside = [step.seconds for step in (before, after) if step and step.beside_pinning]
                if beside:
                    ratios.append(sum(beside) / len(beside) / quiet.seconds)
        if len(ratios) < _SAMPLES:
            return None
        self._steps.clear()
        return median(ratios)
