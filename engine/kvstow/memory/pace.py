"""The pace of pinning: how much one register call takes, and how long the calls of others come first after it.

A register call holds a lock of the driver, so it may hold up whatever else the process asks of its GPU. The lock is
unfair: without a pause the next call wins it again, and others wait for many calls (200 ms were measured).
"""

from __future__ import annotations

from typing import Protocol

from kvstow.config import PoolConfig

CHUNK_BYTES, PAUSE = 64 << 20, 0.002  # where neither is given: 17.7 GiB/s, steps at most 1.2 ms longer
_LATENCY_TARGET = 0.001
_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 1 << 20, 8 << 20, 64 << 20
_HOLD_SHARE = 0.5  # of the target that a call aims at: a step that starts many calls can meet two
_GROWTH = 1.5  # per call at most: one that was fast by chance must not be followed by one that is far too long
_PAUSE_PER_HOLD = 2.0  # others have the lock for two thirds of the time, or more
_LEAST_SECONDS = 1e-6  # of a call: registrars that do nothing take no time


class Pace(Protocol):
    """Driven by one thread; the properties may be read by any."""

    @property
    def chunk_bytes(self) -> int:
        """What the next call should take."""

    @property
    def pause(self) -> float:
        """Seconds to rest after the last call."""

    def record(self, num_bytes: int, seconds: float) -> None:
        """A call took so much processor time."""


class FixedPace:
    """The same whatever the calls take."""

    def __init__(self, chunk_bytes: int, pause: float) -> None:
        self.chunk_bytes, self.pause = chunk_bytes, pause

    def record(self, num_bytes: int, seconds: float) -> None:
        """Nothing follows from it."""


class AdaptivePace:
    """Keeps what pinning adds to the others' latency below a target, by the processor time of its own calls: that is
    how long they hold the lock. What they wait, for the lock or for the interpreter, says nothing of their size: calls
    that shrank with it were so many, at 0.9 GiB/s, that they slowed the steps of vLLM beside them to half."""

    def __init__(self, latency_target: float) -> None:
        self.chunk_bytes = _FIRST_BYTES
        self.pause = 0.0
        self._hold = _HOLD_SHARE * latency_target

    def record(self, num_bytes: int, seconds: float) -> None:
        """Sizes follow a slow call down at once, and a fast one up step by step."""
        seconds = max(seconds, _LEAST_SECONDS)
        aimed = min(num_bytes * self._hold / seconds, self.chunk_bytes * _GROWTH, _MOST_BYTES)
        self.chunk_bytes = max(int(aimed), _LEAST_BYTES)
        self.pause = _PAUSE_PER_HOLD * seconds


def pace_of(config: PoolConfig) -> Pace:
    if not config.has_fixed_pace:
        return AdaptivePace(config.latency_target or _LATENCY_TARGET)
    chunk_bytes = CHUNK_BYTES if config.chunk_bytes is None else config.chunk_bytes
    return FixedPace(chunk_bytes, PAUSE if config.pause is None else config.pause)
