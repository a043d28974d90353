"""How fast the engine computes prompts, measured from its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

LEAST_TOKENS = 256
"""How many prompt tokens a step must compute to show the speed. If a step can have fewer than twice as many tokens,
half of its limit is enough."""
_WEIGHT = 0.2
"""The weight of the newest step that only decodes."""
_LEAST_SHARE = 0.5
"""The least share of its time with which a step that also decodes counts."""


class ScheduledStep(Protocol):
    """The part of vLLM's `SchedulerOutput` that is read. Its `scheduled_spec_decode_tokens` are drafts."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...


class Prefill(NamedTuple):
    """How many prompt tokens were computed, and in how many seconds."""

    tokens: int
    seconds: float


class _Planned(NamedTuple):
    number: int
    at: float
    prefill: int
    decode: int


class PrefillMeter:
    """Times the steps that compute prompts. Used by the scheduler's thread.

    Tokens that were loaded or found on the GPU are not computed, and do not count. A step begins when it is planned. If
    vLLM plans ahead, it begins when the step before it has ended. From the time of a step that also decodes, the time
    of a step that only decodes is subtracted. Steps of few tokens take as long as their launch, so they are ignored.
    """

    def __init__(self, least_tokens: int, clock: Callable[[], float]) -> None:
        self._least_tokens, self._clock = least_tokens, clock
        self._planned: deque[_Planned] = deque()
        self._last_end = 0.0
        self._decode_seconds = 0.0

    def planned(self, number: int, step: ScheduledStep) -> None:
        """Steps have ascending numbers. O(1) if all requests decode, otherwise O(requests of the step)."""
        scheduled = step.num_scheduled_tokens
        if not scheduled:
            return
        drafts: Mapping[str, Any] = getattr(step, "scheduled_spec_decode_tokens", None) or {}
        total = getattr(step, "total_num_scheduled_tokens", None)
        prefill = 0
        if total != len(scheduled):
            total = sum(scheduled.values())
            prefill = sum(
                [count for name, count in scheduled.items() if count > 1 + (len(drafts.get(name, ())) if drafts else 0)]
            )
        self._planned.append(_Planned(number, self._clock(), prefill, total - prefill))

    def ended(self, number: int) -> Prefill | None:
        """The step has ended. Returns what it shows about the speed of prefill."""
        now, planned = self._clock(), self._planned
        while planned and planned[0].number < number:
            planned.popleft()
        if not planned or planned[0].number != number:
            return None
        step = planned.popleft()
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        if not step.prefill:
            known = self._decode_seconds
            self._decode_seconds = (1 - _WEIGHT) * known + _WEIGHT * seconds if known else seconds
            return None
        if step.decode:
            seconds = max(seconds - self._decode_seconds, _LEAST_SHARE * seconds)
        return Prefill(step.prefill, seconds) if step.prefill >= self._least_tokens else None
