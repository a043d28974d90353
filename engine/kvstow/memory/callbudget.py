"""How much of its time the pool's host spends on register calls."""

from __future__ import annotations

from collections import deque
from statistics import median

_LEAST_SHARE, _MOST_SHARE = 0.02, 0.3  # of the host's time
_FACTOR = 2  # by which the share changes
_FREE, _FELT = 0.25, 0.5  # of a call's time that the steps become longer by
_SAMPLES = 16  # steps of each kind that are compared
_FEWER = 0.45  # of short steps: the median step has no call
_IN_A_ROW = 3  # steps with a call, then one without for comparison
_WORTHWHILE = 0.001  # seconds: shorter calls spend over a quarter of their time on their fixed cost
_MOST_DEBT = 0.1  # seconds: one call that took unusually long delays the next by at most 5 s of steps


class CallBudget:
    """Decides after each step of the host whether the host may make a call.

    Calls take a share of the host's time that depends on what they cost it. The budget compares the steps that had a
    call with those that had none. A host that waits for its device after each launch does not notice calls, and the
    share grows up to 0.3; a host that is always launching becomes slower by the whole call, and the share stays at
    0.02. Steps that can pay for a call of 1 ms each (50 ms long, at the least share) have one each, but for every
    fourth. Fewer than half of shorter steps have one, so the median step has none.

    Not locked: used by the host's thread. `call_seconds` may be called by any thread. O(1) for a step.
    """

    def __init__(self) -> None:
        self.share = _LEAST_SHARE
        self._step = 0.0  # seconds of the last step, its call left out
        self._credit = 0.0
        self._spent = 0.0  # by the call since the last step
        self._in_a_row = 0
        self._with: deque[float] = deque(maxlen=_SAMPLES)
        self._without: deque[float] = deque(maxlen=_SAMPLES)
        self._calls: deque[float] = deque(maxlen=_SAMPLES)

    def call_seconds(self, most: float) -> float:
        """How long a call should take: what one step can pay for, or `most` where only several steps together can."""
        each = self._step * self.share
        return min(each, most) if each >= _WORTHWHILE else most

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
        self._step = max(0.0, seconds - self._spent)
        self._spent = 0.0
        earned = self._step * self.share
        if earned < _WORTHWHILE:
            earned = min(earned, expected * _FEWER)
        # No more than one call is saved up: a pause of the host must not be followed by many.
        self._credit = min(self._credit + earned, expected)
        if len(self._with) == len(self._without) == _SAMPLES:
            self._compare()

    def allows(self, expected: float) -> bool:
        """Whether the host may make a call of `expected` seconds now. Half of them is enough, and the rest is owed: the
        estimates of a step and of a call may be a little off."""
        return self._credit >= expected / 2 and self._in_a_row < _IN_A_ROW

    def spend(self, seconds: float) -> None:
        """The host has made a call."""
        self._spent = seconds
        self._credit = max(self._credit - seconds, -_MOST_DEBT)

    def _compare(self) -> None:
        cost = (median(self._with) - median(self._without)) / median(self._calls)
        if cost < _FREE:
            self.share = min(self.share * _FACTOR, _MOST_SHARE)
        elif cost > _FELT:
            self.share = max(self.share / _FACTOR, _LEAST_SHARE)
        for samples in (self._with, self._without, self._calls):
            samples.clear()
