from __future__ import annotations

import pytest

from kvstow.memory.hoststeps import IDLE_SECONDS, HostSteps
from kvstow.testing.clock import FakeClock

QUIET_EVERY = 8


class Host:
    """A host whose steps launch for half of their time and wait for the other half."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.steps = HostSteps(self.clock)

    def step(self, seconds: float) -> None:
        self.steps.begin()
        self.clock.advance(seconds / 2)
        self.steps.launched()
        self.clock.advance(seconds / 2)

    def state(self) -> str:
        return self.steps.state(self.clock())


def slowdown(host: Host, *, beside: float, quiet: float, steps: int) -> float | None:
    """What the host's steps say when those that pinning works beside take `beside` seconds."""
    for number in range(1, steps + 1):
        is_quiet = number % QUIET_EVERY == 0
        host.steps.begin()
        assert host.steps.is_quiet == is_quiet
        if not is_quiet:
            with host.steps.pinning:
                pass
        host.clock.advance(quiet if is_quiet else beside)
        host.steps.launched()
    host.steps.begin()
    return host.steps.take_slowdown()


def test_a_host_that_never_begins_a_step_is_idle_once_it_has_started() -> None:
    host = Host()
    assert host.state() == "idle"
    host.steps.is_starting = True
    assert host.state() == "starting"
    host.step(0.01)
    assert not host.steps.is_starting, "whoever makes steps has started"


def test_a_host_launches_then_waits_and_is_idle_when_it_waits_for_long() -> None:
    host = Host()
    host.steps.begin()
    assert host.state() == "launching"
    host.steps.launched()
    assert host.state() == "waiting"
    host.clock.advance(IDLE_SECONDS)
    assert host.state() == "idle", "its device is busy for long, or it has no work"


def test_a_step_that_never_says_launched_does_not_hold_up_pinning_for_good() -> None:
    host = Host()
    host.steps.begin()
    host.clock.advance(10.0)
    assert host.state() == "idle"


def test_steps_beside_pinning_are_compared_with_the_quiet_ones_between_them() -> None:
    assert slowdown(Host(), beside=0.012, quiet=0.010, steps=QUIET_EVERY * 13) == pytest.approx(1.2)
    assert slowdown(Host(), beside=0.010, quiet=0.010, steps=QUIET_EVERY * 13) == pytest.approx(1.0)


def test_too_few_comparisons_are_no_verdict_and_none_counts_twice() -> None:
    host = Host()
    assert slowdown(host, beside=0.012, quiet=0.010, steps=QUIET_EVERY * 5) is None
    assert slowdown(Host(), beside=0.012, quiet=0.010, steps=QUIET_EVERY * 13) is not None
    assert host.steps.take_slowdown() is None


def test_a_machine_that_changes_its_speed_is_not_taken_for_pinning() -> None:
    host = Host()
    for number in range(QUIET_EVERY * 13):
        host.steps.begin()
        if not host.steps.is_quiet:
            with host.steps.pinning:
                pass
        host.clock.advance(0.005 if number < QUIET_EVERY * 6 else 0.010)  # twice as slow from the middle on
        host.steps.launched()
    assert host.steps.take_slowdown() == pytest.approx(1.0)


def test_steps_in_which_the_host_had_to_wait_are_not_compared() -> None:
    host = Host()
    for _ in range(QUIET_EVERY * 13):
        host.steps.begin()
        if not host.steps.is_quiet:
            with host.steps.pinning:
                pass
        host.steps.launched()
        host.clock.advance(IDLE_SECONDS * 5)
    assert host.steps.take_slowdown() is None


def test_work_that_goes_on_into_a_quiet_step_is_seen_in_it() -> None:
    host = Host()
    with host.steps.pinning:
        for _ in range(QUIET_EVERY * 13):
            host.step(0.005)
    assert host.steps.take_slowdown() is None, "there was no quiet step to compare with"


def test_whoever_waits_for_the_host_hears_of_each_begin_and_launch() -> None:
    host, heard = Host(), list[str]()
    host.steps.on_change = lambda: heard.append(host.state())
    host.step(0.002)
    assert heard == ["launching", "waiting"]
