from __future__ import annotations

import random

import pytest

from kvstow.memory.hoststeps import CallBudget

CALL = 0.0014


class Host:
    """Makes steps of `seconds`, of which it waits for its device at the end; if negative, it feels that much more than
    the call. `noise`: how much steps differ."""

    def __init__(self, seconds: float, waits: float, noise: float = 0.0) -> None:
        self.budget = CallBudget()
        self._seconds, self.waits, self._noise = seconds, waits, noise
        self._chance = random.Random(7)
        self.seconds = 0.0

    def run(self, steps: int, call: float = CALL, took: float | None = None) -> list[bool]:
        """For each step, whether it had a call. Each is expected to take `call`, and takes `took`."""
        took = call if took is None else took
        made = []
        for _ in range(steps):
            allowed = self.budget.allows(call)
            made.append(allowed)
            if allowed:
                self.budget.spend(took, call)
            longer = max(0.0, took - self.waits) if allowed else 0.0
            seconds = self._seconds + longer + self._chance.uniform(0, self._noise)
            self.seconds += seconds
            self.budget.end_step(seconds, call)
        return made


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_host_that_is_always_launching_becomes_less_than_5_percent_slower(noise: float) -> None:
    host = Host(0.040, waits=0.0, noise=noise)
    made = host.run(5000)
    assert host.budget.share == pytest.approx(0.045, rel=0.25 if noise else 0.01)
    assert sum(made) * CALL <= 0.045 * host.seconds


def test_of_short_steps_the_median_one_has_no_call() -> None:
    for seconds in (0.002, 0.010, 0.020, 0.030):
        host = Host(seconds, waits=0.0)
        assert sum(host.run(1000)) <= 450, seconds


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seconds", [0.016, 0.020, 0.023, 0.045, 0.048])
def test_a_busy_eager_host_gets_40_gib_in_half_a_minute(seconds: float, noise: float) -> None:
    """Calls of 80 MiB, which take the latency target where 64 MiB take 1.45 ms. One in a hundred takes 5.5 ms."""
    host = Host(seconds * (1 - noise / 2), waits=0.0, noise=seconds * noise)
    took = [0.0018] * 99 + [0.0055]
    num_calls = sum(sum(host.run(1, call=0.0018, took=took[step % 100])) for step in range(int(30 / seconds)))
    assert num_calls * 80 / 1024 / host.seconds >= 40 / 30, (num_calls, host.seconds)


def test_a_host_that_feels_more_than_the_calls_themselves_gives_less_but_not_nothing() -> None:
    host = Host(0.020, waits=-0.003)
    host.run(4000)
    assert host.budget.share == pytest.approx(0.02)
    made = host.run(2000)
    assert sum(made) * CALL == pytest.approx(0.02 * 0.020 * 2000, rel=0.1)


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
    host.waits = 0.0
    host.run(2000)
    began, made = host.seconds, host.run(2000)
    assert sum(made) * CALL == pytest.approx(0.045 * (host.seconds - began), rel=0.1)


def test_long_steps_have_one_call_each_but_for_one_in_32() -> None:
    host = Host(0.060, waits=0.0)
    host.run(64)
    made = host.run(1600)
    assert sum(made) == 1550
    assert not any(all(made[first : first + 32]) for first in range(len(made) - 31))


def test_after_a_pause_one_call_is_made_and_not_many() -> None:
    host = Host(0.001, waits=0.0)
    host.run(10)
    host.budget.end_step(3600.0, CALL)
    assert sum(host.run(20)) == 1


def test_a_call_that_took_very_long_delays_the_next_by_a_few_steps_only() -> None:
    host = Host(0.020, waits=0.0)
    host.run(10)
    host.budget.spend(30.0, CALL)
    host.budget.end_step(30.02, CALL)
    assert 2 <= host.run(200).index(True) <= 5, "it was a stall, and is paid for as two calls"


def test_a_call_is_made_although_it_takes_longer_than_any_step_pays_for() -> None:
    host = Host(0.010, waits=0.0)
    assert any(host.run(100, call=0.020))


@pytest.mark.parametrize(("seconds", "noise", "steps"), [(0.020, 0.006, 6000), (0.012, 0.010, 20000)])
def test_noise_does_not_let_short_steps_have_a_call_each(seconds: float, noise: float, steps: int) -> None:
    host = Host(seconds, waits=0.0, noise=noise)
    made = host.run(steps)
    assert all(sum(made[first : first + 200]) <= 0.48 * 200 for first in range(0, steps, 200))
    assert sum(made) >= 0.35 * steps, "nor does it starve the pool"


def test_noise_does_not_take_the_call_from_long_steps() -> None:
    host = Host(0.046, waits=0.0, noise=0.010)
    made = host.run(4000, call=0.0017)
    assert sum(made) * 75 / 1024 / host.seconds >= 1.3


def test_comparisons_that_say_nothing_change_nothing() -> None:
    """Steps that differ by ten times what a call takes."""
    host = Host(0.046, waits=0.0, noise=0.040)
    host.run(6000, call=0.0017)
    assert 0.5 <= host.budget.cost <= 1.5
    assert 0.03 <= host.budget.share <= 0.09
