"""The machine on which the figures were measured, and how busy other programs keep it."""

from __future__ import annotations

import os
import platform
import time

_QUIET_SHARE = 0.25
_SAMPLE_SECONDS = 1.0


def describe() -> str:
    """Describe the machine in one sentence, for the head of a table."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    kernel = platform.release().partition("-")[0]
    return f"{_cpu_model()}, {os.cpu_count()} cores, {gib:.0f} GiB; Linux {kernel}; Python {platform.python_version()}"


def wait_until_quiet(patience: float) -> float:
    """Wait up to `patience` seconds for a second in which others use less than a quarter of the CPUs. Returns the share
    of the CPUs that was busy in the last second."""
    deadline = time.monotonic() + patience
    while True:
        share = _busy_share()
        if share < _QUIET_SHARE or time.monotonic() >= deadline:
            return share


def _busy_share() -> float:
    busy, total = _cpu_ticks()
    time.sleep(_SAMPLE_SECONDS)
    busy_after, total_after = _cpu_ticks()
    return (busy_after - busy) / max(1, total_after - total)


def _cpu_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of all CPUs since boot."""
    with open("/proc/stat") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:]]
    idle = ticks[3] + ticks[4]
    return sum(ticks[:8]) - idle, sum(ticks[:8])


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()
