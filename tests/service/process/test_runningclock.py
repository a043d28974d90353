"""The clock of a service that may be stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.doubles.fakes import FakeClock

from kvstow_service.process.runningclock import LONGEST_SECONDS, RunningClock


def test_the_time_in_which_the_process_was_stopped_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    monotonic = FakeClock()
    clock = RunningClock(monotonic)
    begun = clock()
    monotonic.advance(60.0)  # a long start, during which nobody watches
    clock.watch()
    for _ in range(3):
        monotonic.advance(1.0)
        assert clock() == monotonic()
        clock.watch()
    monotonic.advance(40.0)
    clock.watch()
    assert clock() == begun + 63.0 + LONGEST_SECONDS
    assert "was stopped for 40.0 s" in caplog.text
    monotonic.advance(1.0)
    clock.watch()
    assert clock() == begun + 64.0 + LONGEST_SECONDS
    assert caplog.text.count("was stopped") == 1


def test_a_thread_that_goes_on_before_the_one_that_watches_sees_no_jump() -> None:
    monotonic = FakeClock()
    clock = RunningClock(monotonic)
    clock.watch()
    monotonic.advance(40.0)
    before = clock()
    assert before == monotonic() - 40.0 + LONGEST_SECONDS
    clock.watch()
    assert clock() == before
    monotonic.advance(1.0)
    assert clock() == before + 1.0


def test_a_pause_that_is_noticed_during_a_look_is_left_out_once() -> None:
    monotonic, others = FakeClock(), list[Callable[[], None]]()

    def read() -> float:
        """Other threads run before it returns."""
        while others:
            others.pop()()
        return monotonic()

    clock = RunningClock(read)
    clock.watch()
    monotonic.advance(40.0)
    before = clock()
    others.append(clock.watch)
    assert before == clock() == clock()
