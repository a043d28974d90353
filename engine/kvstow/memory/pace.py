"""The pace of pinning: the size of each register call, and the pause after it.

A register call holds a lock of the driver, so the host cannot launch anything meanwhile. The lock is unfair: without a
pause the next call acquires it again, and the host waits for many calls (200 ms was measured).
"""

from __future__ import annotations

from typing import Protocol

from kvstow.config import PoolConfig
from kvstow.memory.hoststeps import HostState, HostSteps

CHUNK_BYTES, PAUSE = 64 << 20, 0.002  # where neither is given: 17.7 GiB/s, steps at most 1.2 ms longer
LATENCY_TARGET = 0.0018  # a call of 80 MiB, or of 45 where the machine is slow; a step may become 2 ms longer
_EASE = 5  # factor for a fixed pause while the host starts
_FIRST_BYTES, _MOST_BYTES = 16 << 20, 84 << 20
_LEAST_BYTES = 8 << 20  # any call takes at least 0.25 ms
_GROWTH = 1.5  # per call at most, in case one call was fast by chance
_LEAST_SECONDS = 1e-6  # registrars that do nothing take no time
# Of the time, for register calls. Beside a long step of the device they made a prompt of 1.2 s 1 to 4 % longer at 0.4.
_SHARES: dict[HostState, float] = {"idle": 0.4, "starting": 0.1, "waiting": 0.05}
# Once the host has been idle for long. The next request waits for one call at most, as without it: from its first step
# on, the calls are made between its steps. A pause of 0.9 ms is enough for the unfair lock.
_LONG_IDLE, _LONG_IDLE_SHARE = 0.25, 0.65
_CHUNKS_AHEAD = 12  # populated and not yet registered: 1 GiB at most


class Pace(Protocol):
    """Driven by the pinning thread; any thread may read `chunk_bytes`."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes that the next call should register."""

    @property
    def call_seconds(self) -> float | None:
        """Expected duration of the next call, if the host's thread may make it; None if it must not."""

    @property
    def chunks_ahead(self) -> int:
        """How many chunks may be populated and not yet registered."""

    def delay(self, now: float) -> float:
        """Seconds until the next call may begin; now if 0 or less."""

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """A call that ended at `now` held the driver's lock for `seconds`. On the pinning thread that is its CPU time:
        its elapsed time would include waiting for the lock and the GIL."""


class FixedPace:
    """Fixed size and pause, except for longer pauses while the host starts."""

    call_seconds = None
    chunks_ahead = 1

    def __init__(self, chunk_bytes: int, pause: float, steps: HostSteps) -> None:
        self.chunk_bytes, self.pause = chunk_bytes, pause
        self._steps = steps
        self._ended: float | None = None

    def delay(self, now: float) -> float:
        pause = self.pause * (_EASE if self._steps.is_starting else 1)
        return 0.0 if self._ended is None else self._ended + pause - now

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        self._ended = now


class AdaptivePace:
    """Adapts to what the host is doing.

    While the host makes steps, its own thread makes the calls, for a share of its time that depends on what they cost
    its steps (`CallBudget`). Each takes `latency_target`. While the host is idle, calls take two fifths of the time,
    and two thirds after a quarter of a second; while it starts, a tenth; while it waits for a long step of its device,
    a twentieth."""

    chunks_ahead = _CHUNKS_AHEAD

    def __init__(self, latency_target: float, steps: HostSteps) -> None:
        self.chunk_bytes = _FIRST_BYTES
        self._target = latency_target
        self._steps = steps
        self._bytes_per_second = _FIRST_BYTES / latency_target
        self._seconds = 0.0
        self._ended: float | None = None

    @property
    def call_seconds(self) -> float:
        return self.chunk_bytes / self._bytes_per_second

    def delay(self, now: float) -> float:
        state = self._steps.state(now)
        if self._ended is None or state == "stepping":
            return 0.0  # the host's steps are the pause
        is_long_idle = state == "idle" and self._steps.idle_seconds(now) > _LONG_IDLE
        share = _LONG_IDLE_SHARE if is_long_idle else _SHARES[state]
        return self._ended + self._seconds * (1 / share - 1) - now

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """After a slow call the next is smaller at once; after a fast one it grows step by step."""
        self._ended, self._seconds = now, max(seconds, _LEAST_SECONDS)
        self._bytes_per_second = num_bytes / self._seconds
        aimed = min(self._bytes_per_second * self._target, self.chunk_bytes * _GROWTH, _MOST_BYTES)
        self.chunk_bytes = max(int(aimed), _LEAST_BYTES)


def pace_of(config: PoolConfig, steps: HostSteps) -> Pace:
    if not config.has_fixed_pace:
        return AdaptivePace(config.latency_target or LATENCY_TARGET, steps)
    chunk_bytes = CHUNK_BYTES if config.chunk_bytes is None else config.chunk_bytes
    return FixedPace(chunk_bytes, PAUSE if config.pause is None else config.pause, steps)
