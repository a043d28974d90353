"""How much of its time the pool's host spends on register calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import hypot, sqrt
from statistics import median

_FELT = 0.045  # of the host's time: by so much its steps may become longer on average
_MOST_OF_STEP = 0.045  # a longer call may be felt by fewer than half of the steps only
_FREE, _FREE_IN_A_ROW = 0.3, 5  # of a call's time: such a cost is none, if that many comparisons in a row find it
_FIRST_SHARE = 0.035  # of the host's time: 1.4 GiB/s, if 64 MiB take 1.45 ms
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.3
_FACTOR = 2  # by which the share changes at most
_MOST_COST = 2.5
_DOWN, _UP = 0.5, 0.25  # of a change of the cost that is believed at once
_SAMPLES = 16  # steps of each kind that are compared
_ERROR_OF_MEDIAN = 1.25 / sqrt(_SAMPLES)  # in standard deviations
_DEVIATION = 1.48  # standard deviations to a median deviation, where the tail of long steps does not count
_FEWER = 0.44  # of the steps: the median step has no call
_IN_A_ROW = 31  # steps with a call, then one without for comparison
_MOST_CHARGED = 2  # times what was expected: a call of 100 ms was a stall of the machine, and no step pays for those


class CallBudget:
    """Decides after each step of the host whether the host may make a call.

    Calls are always of full size: each has a fixed cost of about 0.25 ms. How often one is made depends on what calls
    cost: the budget compares the steps that had a call with those that had none. Calls may make the host 4.5 % slower.
    For a host that is always launching, which feels each call in full, that is a share of 0.045 of its time; a host
    that waits for its device after each launch does not notice them, and the share grows up to 0.3. It never falls
    below 0.02, so that a busy host still gets its pool.

    Where a call takes more than 4.5 % of a step and is felt, fewer than half of the steps have one, so the median step
    has none. Otherwise 31 of 32 may have one, and are compared with the one that has none.

    The steps of an eager host differ by more than a call takes. The less a comparison can tell, the less it changes.

    Not locked: used by the host's thread; any thread may read `share` and `cost`. O(1) for a step.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE
        self.cost = 1.0
        """By how much of a call's time the step becomes longer, as far as the comparisons tell."""
        self._free = 0  # comparisons in a row that found no cost
        self._credit = 0.0
        self._spent = 0.0  # by the call since the last step
        self._in_a_row = 0
        self._with: deque[float] = deque(maxlen=_SAMPLES)
        self._without: deque[float] = deque(maxlen=_SAMPLES)
        self._calls: deque[float] = deque(maxlen=_SAMPLES)

    def end_step(self, seconds: float, expected: float) -> None:
        """A step took `seconds`, including a call made since the last step ended. The next call is expected to take
        `expected` seconds."""
        if self._spent:
            self._with.append(seconds)
            self._calls.append(self._spent)
            self._in_a_row += 1
        else:
            self._without.append(seconds)
            self._in_a_row = 0
        step = max(0.0, seconds - self._spent)
        self._spent = 0.0
        earned = step * self.share
        if expected > step * _MOST_OF_STEP and self._free < _FREE_IN_A_ROW:
            earned = min(earned, expected * _FEWER)
        # No more than one call is saved up: a pause of the host must not be followed by many.
        self._credit = min(self._credit + earned, expected)
        if len(self._with) == len(self._without) == _SAMPLES:
            self._compare()

    def allows(self, expected: float) -> bool:
        """Whether the host may make a call of `expected` seconds now. Half of them is enough, and the rest is owed: the
        estimates of a step and of a call may be a little off."""
        return self._credit >= expected / 2 and self._in_a_row < _IN_A_ROW

    def spend(self, seconds: float, expected: float) -> None:
        """The host has made a call of `seconds`, where `expected` were allowed. One that took unusually long delays the
        next a little: on a machine that stalls for 100 ms now and then, paying for that took up to 5 s of steps."""
        self._spent = seconds
        self._credit -= min(seconds, _MOST_CHARGED * expected)

    def _compare(self) -> None:
        call = median(self._calls)
        found = (median(self._with) - median(self._without)) / call
        error = _ERROR_OF_MEDIAN * hypot(_deviation(self._with), _deviation(self._without)) / call
        found = min(max(found, 0.0), _MOST_COST)
        self._free = self._free + 1 if found + error < _FREE else 0
        # A host that feels nothing is believed sooner than one that feels more than the calls take.
        believed = (_DOWN if found < self.cost else _UP) / (1 + error * error)
        self.cost += (found - self.cost) * believed
        share = _FELT / max(self.cost, _FELT)
        share = min(max(share, self.share / _FACTOR), self.share * _FACTOR)
        self.share = min(max(share, _LEAST_SHARE), _MOST_SHARE)
        for samples in (self._with, self._without, self._calls):
            samples.clear()


def _deviation(samples: Collection[float]) -> float:
    """About a standard deviation."""
    middle = median(samples)
    return _DEVIATION * median(abs(sample - middle) for sample in samples)
