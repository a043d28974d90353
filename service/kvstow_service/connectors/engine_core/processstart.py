"""When this process began: what has changed since then may differ from what vLLM has read."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

_START_FIELD = 19  # of /proc/PID/stat, behind the name: the time in ticks since the machine started


def process_start() -> float:
    """When this process began, in seconds since the epoch. vLLM loads weights and adapters after that."""
    return _start_of("self")


def program_start() -> float:
    """When the process that has started this one began, if it is vLLM's, too: it reads the model's configuration and
    the files of its processor before it starts engines."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return process_start()
    try:
        return min(process_start(), _start_of(str(parent.pid)))
    except OSError:  # it has ended, or has another namespace
        return process_start()


def _start_of(process: str) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
