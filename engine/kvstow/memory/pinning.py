"""Pinning: how populated memory is registered for the copies of a device, at which pace, and the progress of it.

A register call holds a lock of the driver, so the host cannot launch anything meanwhile. The lock is unfair: without a
pause the next call acquires it again, and the host waits for many calls (200 ms was measured).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.errors import PinError
from kvstow.memory.hoststeps import HostState, HostSteps
from kvstow.memory.region import libc


class Registrar(Protocol):
    """Registers a pool's memory range by range. Called by one thread at a time: the pool's pinning thread, its host's
    thread (see `HostSteps`), and finally the thread that closes the pool."""

    @property
    def mode(self) -> str:
        """The current kind of pinning: "mlock", "cuda", "populate" (resident only), ..."""

    @property
    def locked_bytes(self) -> int:
        """Bytes that the kernel cannot swap out now."""

    @property
    def notice(self) -> str | None:
        """A sentence for people if the memory is not fully pinned, else None."""

    def prepare_thread(self) -> None:
        """Called once, first, on the pinning thread. If it raises `PinError` it is called again."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range of whole pages. Raises `PinError`; after any error none of it is pinned."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register` of the same range. Raises `PinError`; after any error the range is still pinned."""


class PopulateOnly:
    """Pins nothing: the memory is resident, but the kernel may swap it out."""

    mode = "populate"
    locked_bytes = 0
    notice = None

    def prepare_thread(self) -> None:
        """Nothing to prepare."""

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to pin."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Nothing to undo."""


class PinProgress:
    """Rate and duration of the current or last growth. Not locked: the pool calls it under its own lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._elapsed = 0.0
        self._started: tuple[float, int] | None = None  # time and bytes when the growth began
        self._pinned: tuple[float, int] | None = None  # time and bytes when its last chunk was pinned

    def begin(self, pinned_bytes: int) -> None:
        """Growth starts at `pinned_bytes`. No effect while it is under way."""
        if self._began is None:
            self._began = self._clock()
            self._started, self._pinned = (self._began, pinned_bytes), None

    def record(self, pinned_bytes: int) -> None:
        self._pinned = self._clock(), pinned_bytes

    def end(self) -> None:
        self._elapsed = self.elapsed
        self._began = None

    @property
    def elapsed(self) -> float:
        """Seconds of the current growth, or of the last one."""
        return self._elapsed if self._began is None else self._clock() - self._began

    @property
    def rate(self) -> float | None:
        """Bytes that the growth has pinned, divided by the time from its start to its last chunk, pauses included;
        None if it has pinned none. It does not change once the growth has ended or stalled."""
        if self._started is None or self._pinned is None:
            return None
        (began, before), (pinned, after) = self._started, self._pinned
        return (after - before) / (pinned - began) if pinned > began else None


class MlockRegistrar:
    """Locks memory with `mlock`, as far as the process may. After the first refusal it locks no more: the memory is
    populated and usable, `mode` becomes "populate", and `notice` names the limit. One registrar per pool."""

    def __init__(self) -> None:
        self.locked_bytes = 0
        self.notice: str | None = None
        self._locked: set[int] = set()

    @property
    def mode(self) -> str:
        return "mlock" if self.notice is None else "populate"

    def prepare_thread(self) -> None:
        """Locks belong to the process, so there is nothing to do."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.notice is not None:
            return
        self._locked.add(address)  # before the call, which a signal handler may interrupt
        if libc.mlock(address, num_bytes) == 0:
            self.locked_bytes += num_bytes
            return
        code = ctypes.get_errno()
        self._locked.remove(address)
        libc.munlock(address, num_bytes)  # it may have locked a part
        what = f"mlock of {format_size(num_bytes)} failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
        if not _forbidden(code, num_bytes):
            raise PinError("memlock", what)
        self.notice = (
            f"{what}; RLIMIT_MEMLOCK is {format_size(_memlock_limit())} and CAP_IPC_LOCK is missing. "
            f"{format_size(self.locked_bytes)} are locked; the rest is populated, but the machine may swap it"
        )

    def unregister(self, address: int, num_bytes: int) -> None:
        if address not in self._locked:
            return
        if libc.munlock(address, num_bytes) != 0:
            raise PinError("memlock", f"munlock of {format_size(num_bytes)} failed: {os.strerror(ctypes.get_errno())}")
        self._locked.remove(address)
        self.locked_bytes -= num_bytes


class HugetlbRegistrar(PopulateOnly):
    """For reserved huge pages: they are never swapped, so they need no lock and no limit applies."""

    mode = "hugetlb"

    def __init__(self) -> None:
        self.locked_bytes = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.locked_bytes += num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        self.locked_bytes -= num_bytes


def cpu_registrar(config: PoolConfig) -> Registrar:
    """The registrar for a pool that only the CPU copies from."""
    return HugetlbRegistrar() if config.huge_pages == "reserved" else MlockRegistrar()


def _forbidden(code: int, num_bytes: int) -> bool:
    """Whether `mlock` failed for lack of permission: EPERM at a limit of 0, ENOMEM above a limit. ENOMEM alone can have
    other causes."""
    limit = _memlock_limit()
    above_limit = limit != resource.RLIM_INFINITY and _locked_by_process() + num_bytes > limit
    return code == errno.EPERM or (code == errno.ENOMEM and above_limit)


def _memlock_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _locked_by_process() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:")), 0)


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


class FixedPace:
    """Fixed size and pause, except for longer pauses while the host starts."""

    call_seconds = None  # the host's thread must not make the calls
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
    a twentieth.

    Driven by the pinning thread; any thread may read `chunk_bytes`, the bytes that the next call should register."""

    chunks_ahead = _CHUNKS_AHEAD  # may be populated and not yet registered

    def __init__(self, latency_target: float, steps: HostSteps) -> None:
        self.chunk_bytes = _FIRST_BYTES
        self._target = latency_target
        self._steps = steps
        self._bytes_per_second = _FIRST_BYTES / latency_target
        self._seconds = 0.0
        self._ended: float | None = None

    @property
    def call_seconds(self) -> float:
        """Expected duration of the next call, which the host's thread may make."""
        return self.chunk_bytes / self._bytes_per_second

    def delay(self, now: float) -> float:
        """Seconds until the next call may begin; now if 0 or less."""
        state = self._steps.state(now)
        if self._ended is None or state == "stepping":
            return 0.0  # the host's steps are the pause
        is_long_idle = state == "idle" and self._steps.idle_seconds(now) > _LONG_IDLE
        share = _LONG_IDLE_SHARE if is_long_idle else _SHARES[state]
        return self._ended + self._seconds * (1 / share - 1) - now

    def record(self, num_bytes: int, seconds: float, now: float) -> None:
        """A call that ended at `now` held the driver's lock for `seconds`. On the pinning thread that is its CPU time:
        its elapsed time would include waiting for the lock and the GIL. After a slow call the next is smaller at once;
        after a fast one it grows step by step."""
        self._ended, self._seconds = now, max(seconds, _LEAST_SECONDS)
        self._bytes_per_second = num_bytes / self._seconds
        aimed = min(self._bytes_per_second * self._target, self.chunk_bytes * _GROWTH, _MOST_BYTES)
        self.chunk_bytes = max(int(aimed), _LEAST_BYTES)


Pace = FixedPace | AdaptivePace


def pace_of(config: PoolConfig, steps: HostSteps) -> Pace:
    if not config.has_fixed_pace:
        return AdaptivePace(config.latency_target or LATENCY_TARGET, steps)
    chunk_bytes = CHUNK_BYTES if config.chunk_bytes is None else config.chunk_bytes
    return FixedPace(chunk_bytes, PAUSE if config.pause is None else config.pause, steps)
