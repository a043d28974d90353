"""The interpreter's switch interval: how long a thread may hold the GIL while others wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 0.0005
"""The default of `short_switch_interval`."""

_changing = threading.Lock()
_wanted: list[float] = []
"""The intervals that threads have set, which are inside `short_switch_interval` now."""
_before = 0.0
"""The host's interval, while `_wanted` has any."""


@contextmanager
def short_switch_interval(seconds: float = _SECONDS) -> Iterator[None]:
    """Lower the switch interval from 5 ms to `seconds` for the whole process. An interval that is lower already is
    kept.

    With 0.5 ms, for imports on a background thread, the host's longest step took 20 to 30 ms instead of 50 to 80.
    Several threads may be inside at once: the smallest interval counts, and the last one to leave restores the host's.
    """
    global _before
    with _changing:
        if not _wanted:
            _before = sys.getswitchinterval()
        _wanted.append(seconds)
        sys.setswitchinterval(min(_before, *_wanted))
    try:
        yield
    finally:
        with _changing:
            _wanted.remove(seconds)
            sys.setswitchinterval(min([_before, *_wanted]))
