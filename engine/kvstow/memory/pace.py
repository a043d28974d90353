"""The pace of pinning: how much one register call takes, and when the next one may begin.

A register call holds a lock of the driver, so the host can launch nothing meanwhile. The lock is unfair: without a
pause the next call wins it again, and the host waits for many calls (200 ms were measured).
"""

from __future__ import annotations

from typing import Protocol

from kvstow.config import PoolConfig
from kvstow.memory.hoststeps import HostSteps

CHUNK_BYTES, PAUSE = 64 << 20, 0.002  # where neither is given: 17.7 GiB/s, steps at most 1.2 ms longer
_LATENCY_TARGET = 0.0015  # a call of 40 MiB; smaller ones spend more of their time on what every call costs
_EASE = 5  # times a fixed pause while the host starts
_FIRST_BYTES, _MOST_BYTES = 16 << 20, 64 << 20
_LEAST_BYTES = 8 << 20  # a call takes 0.25 ms however small it is, and as much of the interpreter around it
_GROWTH = 1.5  # per call at most: one that was fast by chance must not be followed by one that is far too long
_LEAST_SECONDS = 1e-6  # of a call: registrars that do nothing take no time

_IDLE_SHARE = 0.4  # of the time in register calls: a step that begins meanwhile waits for one call, not for several
_LEAST_SHARE, _FIRST_SHARE, _MOST_SHARE = 0.055, 0.06, 0.2
_STARTING_SHARE = 0.1
_SLOWER, _FASTER = 0.7, 1.25  # what a verdict on the host's steps does to the share
_MOST_SLOWDOWN, _GOOD_SLOWDOWN = 1.04, 1.02
_PATIENCE = 0.01  # a call that is due waits so long for the host to have launched its step
_LOOK = 0.01  # seconds between two looks at a host that says nothing


class Pace(Protocol):
    """Driven by the pinning thread; `chunk_bytes` may be read by any."""

    @property
    def chunk_bytes(self) -> int:
        """What the next call should take."""

    def delay(self, now: float) -> float:
        """Seconds until the next call may begin, or until it should be asked again; 0: now."""

    def rest(self, now: float) -> float:
        """The same for populating, which holds no lock of the driver."""

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """A call that has ended at `now` took so much processor time: that is how long it held the driver's lock. Its
        whole time also says how long it waited, for the lock or the interpreter."""


class FixedPace:
    """The same whatever the calls take and the host does; only while it starts, the pauses are longer."""

    def __init__(self, chunk_bytes: int, pause: float, steps: HostSteps) -> None:
        self.chunk_bytes, self.pause = chunk_bytes, pause
        self._steps = steps
        self._ended: float | None = None

    def delay(self, now: float) -> float:
        pause = self.pause * (_EASE if self._steps.is_starting else 1)
        return 0.0 if self._ended is None else max(0.0, self._ended + pause - now)

    def rest(self, now: float) -> float:
        return 0.0

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        self._ended = now


class AdaptivePace:
    """Follows what the host feels.

    One call takes about `latency_target`. Register calls together take a share of the time: two fifths while the host
    is idle, or its device busy for long. Beside steps the share follows how much longer they take with pinning than
    without, 4 % at most; but it stays at 5.5 % or more, so a pool grows by about 1.4 GiB/s whatever the host does.

    A call that is due waits for a moment until the host has launched the work of its step: after that, the host needs
    the driver less.
    """

    def __init__(self, latency_target: float, steps: HostSteps) -> None:
        self.chunk_bytes = _FIRST_BYTES
        self.share = _FIRST_SHARE
        self._target = latency_target
        self._steps = steps
        self._seconds = 0.0
        self._ended: float | None = None

    def delay(self, now: float) -> float:
        state = self._steps.state(now)
        if rest := self.rest(now):
            return rest
        if self._ended is None:
            return 0.0
        due = self._ended + self._seconds * (1 / self._share_beside(state) - 1)
        if now < due:
            return due - now
        if state == "launching":
            return max(0.0, due + _PATIENCE - now)
        return 0.0

    def rest(self, now: float) -> float:
        return _LOOK if self._steps.is_quiet and self._steps.state(now) in ("launching", "waiting") else 0.0

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """Sizes follow a slow call down at once, and a fast one up step by step."""
        self._ended, self._seconds = now, max(seconds, _LEAST_SECONDS)
        aimed = min(num_bytes * self._target / self._seconds, self.chunk_bytes * _GROWTH, _MOST_BYTES)
        self.chunk_bytes = max(int(aimed), _LEAST_BYTES)
        slowdown = self._steps.take_slowdown()
        if slowdown is not None and slowdown > _MOST_SLOWDOWN:
            self.share = max(_LEAST_SHARE, self.share * _SLOWER)
        elif slowdown is not None and slowdown < _GOOD_SLOWDOWN:
            self.share = min(_MOST_SHARE, self.share * _FASTER)

    def _share_beside(self, state: str) -> float:
        if state == "idle":
            return _IDLE_SHARE
        return _STARTING_SHARE if state == "starting" else self.share


def pace_of(config: PoolConfig, steps: HostSteps) -> Pace:
    if not config.has_fixed_pace:
        return AdaptivePace(config.latency_target or _LATENCY_TARGET, steps)
    chunk_bytes = CHUNK_BYTES if config.chunk_bytes is None else config.chunk_bytes
    return FixedPace(chunk_bytes, PAUSE if config.pause is None else config.pause, steps)
