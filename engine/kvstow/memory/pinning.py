"""Pinning: registers populated memory for the copies of a device, at a pace that the host can bear.

A register call holds a lock of the driver, so the host can launch nothing meanwhile. The lock is unfair: without a
pause between calls, the next call acquires it again, and the host waits for many of them (200 ms was measured).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.errors import PinError
from kvstow.memory.hoststeps import HostState, HostSteps
from kvstow.memory.region import libc

CHUNK_BYTES = 64 << 20
"""The size of a register call at a fixed pace, unless it is configured. With `PAUSE`, pinning reaches 17.7 GiB/s and
makes steps at most 1.2 ms longer."""
PAUSE = 0.002
"""The pause between two register calls at a fixed pace, in seconds, unless it is configured."""
LATENCY_TARGET = 0.0018
"""The duration of a register call at the adaptive pace, in seconds, unless it is configured. A call then registers
80 MiB, or 45 on a slow machine, and makes a step at most 2 ms longer."""
_STARTING_FACTOR = 5
"""While the host starts, a fixed pause is longer by this factor."""
_FIRST_BYTES, _MOST_BYTES = 16 << 20, 84 << 20
"""The size of the first register call at the adaptive pace, and the largest size."""
_LEAST_BYTES = 8 << 20
"""The smallest size of a register call at the adaptive pace: even a small call takes 0.25 ms."""
_MOST_GROWTH = 1.5
"""A call is larger than the previous one by at most this factor, because one call may be fast by chance."""
_LEAST_SECONDS = 1e-6
"""The least duration of a call that is recorded. A registrar that does nothing would take no time."""
_SHARES: dict[HostState, float] = {"idle": 0.4, "starting": 0.1, "waiting": 0.05}
"""The fraction of the time for register calls in each state of the host. It is small while the host waits for a long
step of the device: with 0.4 in that state, a prompt of 1.2 s took 1 to 4 % longer."""
_LONG_IDLE_SECONDS, _LONG_IDLE_SHARE = 0.25, 0.65
"""The fraction of the time for register calls once the host has been idle for this long. Even then a new request waits
for one call at most, because from its first step on the calls are made between steps. A pause of 0.9 ms is long enough
for the unfair lock."""
_CHUNKS_AHEAD = 12
"""How many chunks may be populated and not yet registered. They have 1 GiB at most."""


class Registrar(Protocol):
    """Registers a pool's memory range by range. Called by one thread at a time: the pool's pinning thread, its host's
    thread (see `HostSteps`), and finally the thread that closes the pool."""

    @property
    def mode(self) -> str:
        """The current kind of pinning: "mlock", "cuda", "hugetlb", or "populate" for memory that is only resident."""

    @property
    def locked_bytes(self) -> int:
        """How many bytes the kernel cannot swap out now."""

    @property
    def notice(self) -> str | None:
        """A sentence for operators if the memory is not fully pinned, else None."""

    def prepare_thread(self) -> None:
        """Prepare the pinning thread. The thread calls this once, before any other method, and again if it raised
        `PinError`."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range of whole pages. Raises `PinError`. After any error, nothing of the range is pinned."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register` of the same range. Raises `PinError`. After any error, the range is still pinned."""


class PopulateOnly:
    """Pins nothing. The memory is resident, but the kernel may swap it out."""

    mode = "populate"
    locked_bytes = 0
    notice = None

    def prepare_thread(self) -> None:
        """The thread needs no preparation."""

    def register(self, address: int, num_bytes: int) -> None:
        """The memory stays as it is."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """The memory stays as it is."""


class _Pinned(NamedTuple):
    """How many bytes were pinned at a time."""

    time: float
    num_bytes: int


class PinProgress:
    """Measures the rate and the duration of the current growth, or of the last one.

    Not locked, because the pool calls it while it holds its own lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._elapsed = 0.0
        self._is_growing = False
        self._first: _Pinned | None = None
        """What was pinned when the growth began."""
        self._last: _Pinned | None = None
        """What was pinned after the last chunk."""

    def begin(self, pinned_bytes: int) -> None:
        """Begin a growth at `pinned_bytes`. Has no effect while a growth is under way."""
        if not self._is_growing:
            self._is_growing = True
            self._first, self._last = _Pinned(self._clock(), pinned_bytes), None

    def record(self, pinned_bytes: int) -> None:
        """Record that `pinned_bytes` are pinned now."""
        self._last = _Pinned(self._clock(), pinned_bytes)

    def end(self) -> None:
        """End the growth."""
        self._elapsed = self.elapsed
        self._is_growing = False

    @property
    def elapsed(self) -> float:
        """The duration of the current growth, or of the last one, in seconds."""
        return self._clock() - self._first.time if self._is_growing and self._first is not None else self._elapsed

    @property
    def rate(self) -> float | None:
        """The bytes that the growth has pinned per second from its start to its last chunk, pauses included. None if it
        has pinned nothing. The rate does not change once the growth has ended or stalled."""
        first, last = self._first, self._last
        if first is None or last is None or last.time <= first.time:
            return None
        return (last.num_bytes - first.num_bytes) / (last.time - first.time)


class MlockRegistrar:
    """Locks memory with `mlock` until the kernel refuses. The rest of the memory is then populated and usable, but not
    locked: `mode` becomes "populate", and `notice` names the limit. Each pool has a registrar of its own."""

    def __init__(self) -> None:
        self.locked_bytes = 0
        self.notice: str | None = None
        self._locked: set[int] = set()

    @property
    def mode(self) -> str:
        return "mlock" if self.notice is None else "populate"

    def prepare_thread(self) -> None:
        """The thread needs no preparation, because locks belong to the process."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.notice is not None:
            return
        self._locked.add(address)  # before the call, because a signal handler may interrupt it
        if libc.mlock(address, num_bytes) == 0:
            self.locked_bytes += num_bytes
            return
        code = ctypes.get_errno()
        self._locked.remove(address)
        libc.munlock(address, num_bytes)  # the call may have locked a part
        what = f"mlock of {format_size(num_bytes)} failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
        if not _is_forbidden(code, num_bytes):
            raise PinError("memlock", what)
        self.notice = (
            f"{what}; RLIMIT_MEMLOCK is {format_size(_memlock_limit())} and CAP_IPC_LOCK is missing. "
            f"{format_size(self.locked_bytes)} are locked; the rest is populated, but the kernel may swap it out"
        )

    def unregister(self, address: int, num_bytes: int) -> None:
        if address not in self._locked:
            return
        if libc.munlock(address, num_bytes) != 0:
            raise PinError("memlock", f"munlock of {format_size(num_bytes)} failed: {os.strerror(ctypes.get_errno())}")
        self._locked.remove(address)
        self.locked_bytes -= num_bytes


class HugetlbRegistrar(PopulateOnly):
    """Counts reserved huge pages as locked. The kernel never swaps them out, so they need no lock, and no limit
    applies."""

    mode = "hugetlb"

    def __init__(self) -> None:
        self.locked_bytes = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.locked_bytes += num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        self.locked_bytes -= num_bytes


def cpu_registrar(config: PoolConfig) -> Registrar:
    """Return the registrar of a pool that no device copies from."""
    return HugetlbRegistrar() if config.huge_pages == "reserved" else MlockRegistrar()


def _is_forbidden(code: int, num_bytes: int) -> bool:
    """Whether `mlock` failed because the process lacks the permission. The kernel answers EPERM if the limit is 0, and
    ENOMEM above the limit. ENOMEM can have other causes, too, so the limit is compared."""
    limit = _memlock_limit()
    above_limit = limit != resource.RLIM_INFINITY and _locked_by_process() + num_bytes > limit
    return code == errno.EPERM or (code == errno.ENOMEM and above_limit)


def _memlock_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _locked_by_process() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:")), 0)


class FixedPace:
    """Makes register calls of a fixed size, with a fixed pause. While the host starts, the pauses are longer."""

    call_seconds = None
    """The host's thread makes no calls at this pace."""
    chunks_ahead = 1
    """How many chunks may be populated and not yet registered."""

    def __init__(self, chunk_bytes: int, pause: float, steps: HostSteps) -> None:
        self.chunk_bytes, self.pause = chunk_bytes, pause
        self._steps = steps
        self._end_time: float | None = None

    def delay(self, now: float) -> float:
        """Return the seconds until the next call may begin. It may begin now if the result is 0 or less."""
        pause = self.pause * (_STARTING_FACTOR if self._steps.is_starting else 1)
        return 0.0 if self._end_time is None else self._end_time + pause - now

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """Record that a call ended at `now`."""
        self._end_time = now


class AdaptivePace:
    """Adapts the size and the pauses of register calls to what the host is doing.

    While the host makes steps, its own thread makes the calls, and `CallBudget` decides how often. Each call takes
    `latency_target`. While the host is idle, calls take two fifths of the time, and two thirds after a quarter of a
    second. While it starts, they take a tenth, and while it waits for a long step of its device, a twentieth.

    Only the pinning thread uses it, but any thread may read `chunk_bytes`.
    """

    chunks_ahead = _CHUNKS_AHEAD
    """How many chunks may be populated and not yet registered."""

    def __init__(self, latency_target: float, steps: HostSteps) -> None:
        self.chunk_bytes = _FIRST_BYTES
        """How many bytes the next call should register."""
        self._latency_target = latency_target
        self._steps = steps
        self._bytes_per_second = _FIRST_BYTES / latency_target
        self._last_seconds = 0.0
        self._end_time: float | None = None

    @property
    def call_seconds(self) -> float:
        """The expected duration of the next call, which the host's thread may make."""
        return self.chunk_bytes / self._bytes_per_second

    def delay(self, now: float) -> float:
        """Return the seconds until the next call may begin. It may begin now if the result is 0 or less."""
        state = self._steps.state(now)
        if self._end_time is None or state == "stepping":
            return 0.0  # the host's thread makes calls between its steps, which are the pauses
        is_long_idle = state == "idle" and self._steps.idle_seconds(now) > _LONG_IDLE_SECONDS
        share = _LONG_IDLE_SHARE if is_long_idle else _SHARES[state]
        return self._end_time + self._last_seconds * (1 / share - 1) - now

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """Record a call that ended at `now` and held the driver's lock for `seconds`.

        For a call of the pinning thread that is its CPU time, because its elapsed time includes the wait for the lock
        and the GIL. After a slow call the next one is smaller at once. After a fast call it grows step by step.
        """
        self._end_time, self._last_seconds = now, max(seconds, _LEAST_SECONDS)
        self._bytes_per_second = num_bytes / self._last_seconds
        wanted = min(self._bytes_per_second * self._latency_target, self.chunk_bytes * _MOST_GROWTH, _MOST_BYTES)
        self.chunk_bytes = max(int(wanted), _LEAST_BYTES)


Pace = FixedPace | AdaptivePace


def pace_of(config: PoolConfig, steps: HostSteps) -> Pace:
    """Return the pace that a pool's configuration asks for."""
    if not config.has_fixed_pace:
        return AdaptivePace(config.latency_target or LATENCY_TARGET, steps)
    chunk_bytes = CHUNK_BYTES if config.chunk_bytes is None else config.chunk_bytes
    return FixedPace(chunk_bytes, PAUSE if config.pause is None else config.pause, steps)
