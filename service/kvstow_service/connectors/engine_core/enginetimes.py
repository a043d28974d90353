"""What this engine's steps and loads take, as they were measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstow.prefill import PrefillCost, PrefillFit, PromptPart

_FIRST_RATE = 20e9  # bytes a second, until a load was measured
_FIRST_DELAY = 0.005  # seconds, until a load before a step was measured
_NEW = 0.2  # weight of a new measurement
_LEAST_BYTES = 16 << 20  # of a load whose rate is measured
_STALE = 60.0  # seconds after which a rate may have changed
_STEPS = 8
_LEAST_SHARE = 0.5
"""The least share of its time with which a step that also decodes counts."""


class LoadTimes:
    """Of loads by layer, and of loads before the step: on some hosts their rates differ by half. O(1)."""

    def __init__(self, slot_bytes: int, clock: Callable[[], float]) -> None:
        self._slot_bytes, self._clock = slot_bytes, clock
        self._rates: dict[bool, float] = {}  # of loads by layer (True) and before the step, once measured
        self._layers_tried_at = 0.0
        self.delay = _FIRST_DELAY
        """Seconds of a load before the step, beside its copy."""

    def seconds(self, num_blocks: int, *, by_layer: bool) -> float:
        """How long so many blocks take on the link."""
        rate = self._rates.get(by_layer) or self._rates.get(not by_layer) or _FIRST_RATE
        return num_blocks * self._slot_bytes / rate

    def measured(self, num_bytes: int, seconds: float, *, by_layer: bool) -> None:
        """A load on some rank was so fast."""
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            rate = num_bytes / seconds
            before = self._rates.get(by_layer, rate)
            self._rates[by_layer] = before + _NEW * (rate - before)
            if by_layer:
                self._layers_tried_at = self._clock()

    def has_taken(self, seconds: float, num_blocks: int) -> None:
        """So long after it had begun, a load before the step has ended, and with it so many blocks on the link."""
        delay = seconds - self.seconds(num_blocks, by_layer=False)
        self.delay += _NEW * (max(0.0, delay) - self.delay)

    def needs_whole(self, num_blocks: int) -> bool:
        """Whether only loads by layer were measured: then this one goes before its step, to be compared with."""
        return self._rates.keys() == {True} and self._shows_a_rate(num_blocks)

    def needs_layers(self, num_blocks: int) -> bool:
        """Whether no load has gone by layer for a minute. Where these were slower once, none would show that they no
        longer are."""
        return self._clock() >= self._layers_tried_at + _STALE and self._shows_a_rate(num_blocks)

    def trying_layers(self) -> None:
        self._layers_tried_at = self._clock()

    def _shows_a_rate(self, num_blocks: int) -> bool:
        return num_blocks * self._slot_bytes >= _LEAST_BYTES


class StepBegun(NamedTuple):
    """A step. `most`: the most tokens that it computes of a request. `load_seconds`: of its loads by layer."""

    number: int
    at: float
    prompts: PromptPart
    decodes: bool
    most: int
    load_seconds: float


class StepTimes:
    """O(1) for each step.

    A step begins when it is planned. If vLLM plans ahead, it begins when the step before it has ended. From the time of
    a step that also decodes, the time of a step that only decodes is subtracted: without the prompts, it would have
    taken that. Steps of few tokens take as long as their launch, so they show no cost.
    """

    def __init__(self, block_tokens: int, least_tokens: int) -> None:
        """`block_tokens`: in a slot. `least_tokens`: that a step must compute to show what they cost."""
        self._block_tokens, self._least_tokens = block_tokens, least_tokens
        self._planned: deque[StepBegun] = deque()
        self._last: deque[float] = deque(maxlen=_STEPS)  # seconds of the last ones
        self._last_end = 0.0
        self._fit = PrefillFit()
        self.tail = 0.0
        """Seconds of a step in which requests compute the rest of a block; 0 before it was measured."""
        self.decode = 0.0
        """Seconds of a step that only decodes; 0 before it was measured."""

    @property
    def cost(self) -> PrefillCost | None:
        """Of computing prompts; None before it is known."""
        return self._fit.cost

    @property
    def is_under_way(self) -> bool:
        return bool(self._planned)

    @property
    def shortest(self) -> float:
        """Of the last steps; 0 before there was one."""
        return min(self._last, default=0.0)

    def seconds(self, prompts: PromptPart) -> float:
        """How long a step takes that computes these tokens: as its launch does, at least."""
        return max(self.tail or self.decode, 0.0 if self.cost is None else self.cost.seconds(prompts))

    def planned(self, step: StepBegun) -> None:
        self._planned.append(step)

    def ended(self, number: int, now: float) -> float:
        """Returns how long the step has waited for its loads by layer: how much longer it took than it would have
        without them, at most as long as they take."""
        planned = self._planned
        while planned and planned[0].number < number:
            planned.popleft()
        if not planned or planned[0].number != number:
            return 0.0
        step = planned.popleft()
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        self._last.append(seconds)
        if step.load_seconds:
            return min(step.load_seconds, max(0.0, seconds - self._expected(step)))
        if not step.prompts.tokens:
            self.decode = _mean(self.decode, seconds)
            return 0.0
        if step.most <= self._block_tokens:
            self.tail = _mean(self.tail, seconds)
        if step.prompts.tokens >= self._least_tokens:
            if step.decodes:
                seconds = max(seconds - self.decode, _LEAST_SHARE * seconds)
            self._fit.observe(step.prompts, seconds)
        return 0.0

    def _expected(self, step: StepBegun) -> float:
        """How long the step would have taken without loads; 0 if that is not known."""
        prompts = 0.0 if self.cost is None else self.cost.seconds(step.prompts)
        return prompts + self.decode if step.decodes else max(prompts, self.decode)


def _mean(before: float, new: float) -> float:
    return before + _NEW * (new - before) if before else new
