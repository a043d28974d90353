"""How long one thread may keep the interpreter while others want it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 0.0005

_changing = threading.Lock()


@contextmanager
def short_turns() -> Iterator[None]:
    """Beside a thread that imports, a host's thread has the interpreter back within 0.5 ms in place of 5, each time it
    has let go of it: its longest step was 20 to 30 ms, not 50 to 80. Holds for the whole process, so one thread at a
    time is inside."""
    with _changing:
        before = sys.getswitchinterval()
        if before > _SECONDS:
            sys.setswitchinterval(_SECONDS)
        try:
            yield
        finally:
            if before > _SECONDS:
                sys.setswitchinterval(before)
