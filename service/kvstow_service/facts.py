"""What the doctor wants to know of the machine."""

from __future__ import annotations

import re
from pathlib import Path

from kvstow.memory.limits import HugePageLimits, MemoryLimits
from kvstow_api.hostfacts import HostFacts

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CHOSEN = re.compile(r"\[(\w+)\]")


def measure_host(limits: MemoryLimits | None = None, huge_pages: Path = _HUGE_PAGES) -> HostFacts:
    """Reads the files of the kernel anew; takes less than a millisecond. `limits`: those on the pools, by default on
    memory in general. `huge_pages` is a parameter for tests."""
    limits = limits or MemoryLimits()
    headroom = limits.headroom()
    return HostFacts(
        headroom_bytes=None if headroom is None else headroom.num_bytes,
        limit="" if headroom is None else headroom.limit,
        reserve_bytes=limits.reserve_bytes,
        huge_pages="reserved" if isinstance(limits, HugePageLimits) else _chosen(huge_pages),
    )


def _chosen(path: Path) -> str:
    """The word in brackets, as in `always [madvise] never`; empty where the kernel has no such file."""
    try:
        match = _CHOSEN.search(path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""
