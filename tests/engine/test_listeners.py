from __future__ import annotations

import pytest

from kvstow.listeners import Listeners


def test_all_are_told_even_after_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def broken() -> None:
        raise LookupError("lost")

    listeners = Listeners()
    for callback in (lambda: told.append("first"), broken, lambda: told.append("last")):
        listeners.add(callback)
    listeners.tell()
    assert told == ["first", "last"]
    assert "LookupError: lost" in caplog.text
