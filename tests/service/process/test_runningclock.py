"""The clock of a service that may be stopped."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow_service.process.runningclock import RunningClock


def test_the_time_in_which_the_process_was_stopped_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    monotonic = FakeClock()
    clock = RunningClock(monotonic)
    begun = clock()
    monotonic.advance(60.0)  # a long start, during which nobody looks
    clock.watch()
    for _ in range(3):
        monotonic.advance(1.0)
        assert clock() == monotonic()
    monotonic.advance(40.0)
    assert clock() == begun + 63.0
    assert "was stopped for 40.0 s" in caplog.text
    monotonic.advance(1.0)
    assert clock() == begun + 64.0
    assert caplog.text.count("was stopped") == 1


def test_threads_that_go_on_together_leave_a_pause_out_once() -> None:
    clock, seen = RunningClock(), list[float]()
    before = clock()

    def look() -> None:
        seen.extend(clock() for _ in range(1000))

    clock.watch()
    threads: list[Any] = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before <= min(seen) <= max(seen) <= time.monotonic()
