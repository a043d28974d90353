from __future__ import annotations

import random

import pytest

from kvstow.memory.callbudget import CallBudget

CALL = 0.0014


class Host:
    """Makes steps of `seconds`, of which it waits for its device at the end. `noise`: how much steps differ."""

    def __init__(self, seconds: float, waits: float, noise: float = 0.0) -> None:
        self.budget = CallBudget()
        self._seconds, self._waits, self._noise = seconds, waits, noise
        self._chance = random.Random(7)
        self.seconds = 0.0

    def run(self, steps: int, call: float = CALL) -> list[bool]:
        """For each step, whether it had a call."""
        made = []
        for _ in range(steps):
            allowed = self.budget.allows(call)
            made.append(allowed)
            if allowed:
                self.budget.spend(call)
            longer = max(0.0, call - self._waits) if allowed else 0.0
            seconds = self._seconds + longer + self._chance.uniform(0, self._noise)
            self.seconds += seconds
            self.budget.end_step(seconds, call)
        return made


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_host_that_is_always_launching_gives_a_fiftieth_of_its_time(noise: float) -> None:
    host = Host(0.020, waits=0.0, noise=noise)
    made = host.run(5000)
    assert sum(made) * CALL == pytest.approx(0.02 * host.seconds, rel=0.1 if noise else 0.03)
    assert sum(made) < 0.45 * len(made), "the median step has no call"


@pytest.mark.parametrize("noise", [0.0, 0.0003])
def test_a_host_that_waits_for_its_device_gives_as_much_as_it_does_not_notice(noise: float) -> None:
    host = Host(0.005, waits=0.003, noise=noise)
    host.run(1000)
    began, made = host.seconds, host.run(1000)
    assert 0.40 <= sum(made) / len(made) <= 0.75
    assert host.seconds - began == pytest.approx(1000 * (0.005 + noise / 2), rel=0.01), "steps take as long as before"


def test_the_share_falls_again_when_the_host_has_no_more_time_to_wait() -> None:
    host = Host(0.005, waits=0.003)
    host.run(1000)
    host._waits = 0.0
    host.run(2000)
    began, made = host.seconds, host.run(2000)
    assert sum(made) * CALL == pytest.approx(0.02 * (host.seconds - began), rel=0.1)


def test_long_steps_have_one_call_each_but_for_every_fourth() -> None:
    host = Host(0.060, waits=0.0)
    host.run(20)
    assert sorted("".join("x" if made else "." for made in host.run(400)).strip("x").split(".")[1:-1])[0] == "xxx"
    assert sum(host.run(400)) == 300


@pytest.mark.parametrize(("step", "expected"), [(0.002, 0.0015), (0.030, 0.0015), (0.050, 0.001), (0.100, 0.0015)])
def test_a_call_takes_what_one_step_pays_for_unless_that_is_too_little_for_a_call(step: float, expected: float) -> None:
    budget = CallBudget()
    assert budget.call_seconds(0.0015) == 0.0015, "no step is known"
    budget.end_step(step, 0.0)
    assert budget.call_seconds(0.0015) == pytest.approx(expected)


def test_after_a_pause_one_call_is_made_and_not_many() -> None:
    host = Host(0.001, waits=0.0)
    host.run(10)
    host.budget.end_step(3600.0, CALL)
    assert sum(host.run(20)) == 1


def test_a_call_that_took_very_long_delays_the_next_for_a_while_only() -> None:
    host = Host(0.050, waits=0.0)
    host.run(10)
    host.budget.spend(30.0)
    host.budget.end_step(30.05, CALL)
    made = host.run(200)
    assert 97 <= made.index(True) <= 102, "0.1 s are paid back by 5 s of steps"


def test_a_call_is_made_although_it_takes_longer_than_any_step_pays_for() -> None:
    host = Host(0.010, waits=0.0)
    assert any(host.run(100, call=0.020))
