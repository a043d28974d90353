from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstow.memory import hoststeps, pinning


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes of each register call of an adaptive pace, which the time of the calls does not change then."""

    def set_bytes(num_bytes: int) -> None:
        for name in ("_FIRST_BYTES", "_MOST_BYTES", "_LEAST_BYTES"):
            monkeypatch.setattr(pinning, name, num_bytes)

    return set_bytes


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinning thread checks whether the host makes steps every millisecond."""
    monkeypatch.setattr(hoststeps, "_CHECK_HOST_SECONDS", 0.001)
