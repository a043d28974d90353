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
        self.steps.end()
        self.clock.advance(seconds / 2)

    def empty_step(self) -> None:
        """One without work for the device."""
        self.steps.begin()
        self.clock.advance(0.0001)
        self.steps.end()

    def serve(self, number: int, *, beside: float, quiet: float, empty: bool = False) -> None:
        """Steps that take `beside` seconds beside pinning, `quiet` without; with `empty`, others between them."""
        for _ in range(number):
            is_quiet = self.steps.is_quiet
            if not is_quiet:
                with self.steps.pinning:
                    pass
            if empty:
                self.empty_step()
            self.steps.begin()
            self.clock.advance(quiet if is_quiet else beside)
            self.steps.launched()
            self.steps.end()

    @property
    def state(self) -> str:
        return self.steps.state(self.clock())


def test_a_host_that_never_begins_a_step_is_idle_once_it_has_started() -> None:
    host = Host()
    assert host.state == "idle"
    host.steps.is_starting = True
    assert host.state == "starting"
    host.step(0.01)
    assert not host.steps.is_starting, "whoever makes steps has started"


def test_a_host_launches_then_waits_and_is_idle_when_it_waits_for_long() -> None:
    host = Host()
    host.steps.begin()
    assert host.state == "launching"
    host.steps.launched()
    assert host.state == "waiting"
    host.clock.advance(IDLE_SECONDS)
    assert host.state == "idle", "its device is busy for long, or it has no work"


def test_a_step_that_never_ends_does_not_hold_up_pinning_for_good() -> None:
    host = Host()
    host.steps.begin()
    host.clock.advance(10.0)
    assert host.state == "idle"


def test_a_step_without_work_for_the_device_ends_its_launch() -> None:
    host = Host()
    host.empty_step()
    assert host.state == "waiting"


@pytest.mark.parametrize("empty", [False, True])
def test_steps_beside_pinning_are_compared_with_the_quiet_ones_between_them(empty: bool) -> None:
    slowed, unharmed = Host(), Host()
    slowed.serve(QUIET_EVERY * 14, beside=0.012, quiet=0.010, empty=empty)
    unharmed.serve(QUIET_EVERY * 14, beside=0.010, quiet=0.010, empty=empty)
    assert slowed.steps.take_slowdown() == pytest.approx(1.2, abs=0.01)
    assert unharmed.steps.take_slowdown() == pytest.approx(1.0)


def test_too_few_comparisons_are_no_verdict_and_none_counts_twice() -> None:
    host = Host()
    host.serve(QUIET_EVERY * 5, beside=0.012, quiet=0.010)
    assert host.steps.take_slowdown() is None
    host.serve(QUIET_EVERY * 14, beside=0.012, quiet=0.010)
    assert host.steps.take_slowdown() is not None
    assert host.steps.take_slowdown() is None


def test_a_machine_that_changes_its_speed_is_not_taken_for_pinning() -> None:
    host = Host()
    host.serve(QUIET_EVERY * 7, beside=0.005, quiet=0.005)
    host.serve(QUIET_EVERY * 7, beside=0.010, quiet=0.010)
    assert host.steps.take_slowdown() == pytest.approx(1.0)


def test_steps_in_which_the_host_had_to_wait_are_not_compared() -> None:
    host = Host()
    for _ in range(QUIET_EVERY * 14):
        host.serve(1, beside=0.001, quiet=0.001)
        host.clock.advance(IDLE_SECONDS * 5)
    assert host.steps.take_slowdown() is None


def test_work_that_goes_on_into_a_quiet_step_is_seen_in_it() -> None:
    host = Host()
    with host.steps.pinning:
        for _ in range(QUIET_EVERY * 14):
            host.step(0.005)
    assert host.steps.take_slowdown() is None, "there was no quiet step to compare with"


def test_whoever_waits_for_the_host_hears_of_each_change() -> None:
    host, heard = Host(), list[str]()
    host.steps.on_change = lambda: heard.append(host.state)
    host.step(0.002)
    host.empty_step()
    assert heard == ["launching", "waiting", "launching", "waiting"]
