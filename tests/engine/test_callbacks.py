from __future__ import annotations

import pytest

from kvstow.callbacks import Callbacks


def test_all_callbacks_are_called_even_after_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def broken() -> None:
        raise LookupError("lost")

    callbacks = Callbacks()
    for callback in (lambda: called.append("first"), broken, lambda: called.append("last")):
        callbacks.register(callback)
    callbacks.call()
    assert called == ["first", "last"]
    assert "LookupError: lost" in caplog.text
