"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[..., object], what: str = "the condition", *, seconds: float = 60.0) -> None:
    """Poll until a condition holds. Fails with `what` after a deadline that no healthy run comes near."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.01)
