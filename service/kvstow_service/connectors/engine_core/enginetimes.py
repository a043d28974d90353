"""How long this engine's steps and loads take, as measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from kvstow.prefill import PrefillCost, PrefillFit, PromptPart

_FIRST_RATE = 20e9
"""The assumed rate of loads until one is measured, in bytes a second."""
_FIRST_DELAY = 0.005
"""The assumed delay of a load before the step until one is measured, in seconds."""
_NEW = 0.2
"""The weight of a new measurement in a moving average."""
_LEAST_BYTES = 16 << 20
"""The smallest load whose rate is measured, in bytes."""
_STALE = 60.0
"""The time, in seconds, after which the rate of loads by layer may have changed."""
_STEPS = 8
"""How many of the last steps are kept."""
_LEAST_SHARE = 0.5
"""A step that also decodes counts with at least this share of its time."""
_STEPS_OF_SIZE = 9
"""How many of the last steps of each size are kept."""
_LEAST_OF_SIZE = 3
"""How many steps of a size must be measured to show how long they take. The first one may have compiled kernels."""


class LoadTimes:
    """How long loads by layer take, and loads before the step. On some hosts their rates differ by half. O(1)."""

    def __init__(self, slot_bytes: int, clock: Callable[[], float]) -> None:
        self._slot_bytes, self._clock = slot_bytes, clock
        self._rates: dict[bool, float] = {}  # of loads by layer (True) and before the step, once measured
        self._layers_tried_at = 0.0
        self.delay = _FIRST_DELAY
        """How many seconds a load before the step takes in addition to its copy."""

    def seconds(self, num_blocks: int, *, by_layer: bool) -> float:
        """How many seconds the copy of `num_blocks` blocks takes."""
        rate = self._rates.get(by_layer) or self._rates.get(not by_layer) or _FIRST_RATE
        return num_blocks * self._slot_bytes / rate

    def measured(self, num_bytes: int, seconds: float, *, by_layer: bool) -> None:
        """Note how long a load on some rank took."""
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            rate = num_bytes / seconds
            before = self._rates.get(by_layer, rate)
            self._rates[by_layer] = before + _NEW * (rate - before)
            if by_layer:
                self._layers_tried_at = self._clock()

    def has_taken(self, seconds: float, num_blocks: int) -> None:
        """Note that a load before the step has ended `seconds` after its begin. `num_blocks`: how many blocks the link
        has moved meanwhile."""
        delay = seconds - self.seconds(num_blocks, by_layer=False)
        self.delay += _NEW * (max(0.0, delay) - self.delay)

    def needs_whole(self, num_blocks: int) -> bool:
        """Whether this load should go before its step for comparison, because only loads by layer were measured."""
        return self._rates.keys() == {True} and self._shows_a_rate(num_blocks)

    def needs_layers(self, num_blocks: int) -> bool:
        """Whether this load should go by layer because none has for a minute. If loads by layer were slower once, no
        other measurement would show that they no longer are."""
        return self._clock() >= self._layers_tried_at + _STALE and self._shows_a_rate(num_blocks)

    def trying_layers(self) -> None:
        self._layers_tried_at = self._clock()

    def _shows_a_rate(self, num_blocks: int) -> bool:
        return num_blocks * self._slot_bytes >= _LEAST_BYTES


class StepBegun(NamedTuple):
    """A step that was planned. `most`: the largest number of tokens that it computes of one request. `load_seconds`:
    how long its loads by layer take."""

    number: int
    at: float
    prompts: PromptPart
    decodes: bool
    most: int
    load_seconds: float


class StepTimes:
    """How long steps take, and what computing prompts costs. O(1) for each step.

    A step begins when it is planned. If vLLM plans ahead, it begins when the step before it has ended. If a step also
    decodes, the time of a step that only decodes is subtracted from its time, because it would have taken that without
    the prompts. Steps of few tokens take as long as their launch, so they show no cost.

    How long a launch takes depends on the number of tokens: a step of more tokens than the largest CUDA graph is
    launched kernel by kernel, which may take twice as long as to replay a graph. So steps are also measured by size.
    """

    def __init__(self, block_tokens: int, least_tokens: int) -> None:
        """`block_tokens`: tokens in a slot. `least_tokens`: how many tokens a step must compute to show their cost."""
        self._block_tokens, self._least_tokens = block_tokens, least_tokens
        self._planned: deque[StepBegun] = deque()
        self._last: deque[float] = deque(maxlen=_STEPS)  # seconds of the last ones
        self._last_end = 0.0
        self._fit = PrefillFit()
        self._by_size: dict[int, deque[float]] = {}  # seconds of the last steps that computed prompts alone
        self.tail = 0.0
        """How many seconds a step takes in which requests compute at most one block; 0 until it is measured."""
        self.decode = 0.0
        """How many seconds a step takes that only decodes; 0 until it is measured."""

    @property
    def cost(self) -> PrefillCost | None:
        """The cost of computing prompts; None until it is known."""
        return self._fit.cost

    @property
    def is_under_way(self) -> bool:
        return bool(self._planned)

    @property
    def shortest(self) -> float:
        """The shortest time of the last steps, in seconds; 0 before the first one."""
        return min(self._last, default=0.0)

    def seconds(self, prompts: PromptPart) -> float:
        """How many seconds a step takes that computes these tokens; at least as long as its launch."""
        return max(self._launch(prompts.tokens), 0.0 if self.cost is None else self.cost.seconds(prompts))

    def _launch(self, tokens: int) -> float:
        """How many seconds steps of this size take, or of the next smaller one that was measured."""
        most = _size(tokens)
        sizes = [size for size, times in self._by_size.items() if size <= most and len(times) >= _LEAST_OF_SIZE]
        return median(self._by_size[max(sizes)]) if sizes else self.tail or self.decode

    def planned(self, step: StepBegun) -> None:
        self._planned.append(step)

    def ended(self, number: int, now: float) -> float:
        """Note the end of a step. Returns how many seconds it has waited for its loads by layer: how much longer it
        took than it would have taken without them, but no longer than they take."""
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
        if not step.decodes:
            times = self._by_size.setdefault(_size(step.prompts.tokens), deque(maxlen=_STEPS_OF_SIZE))
            times.append(seconds)
        if step.prompts.tokens >= self._least_tokens:
            if step.decodes:
                seconds = max(seconds - self.decode, _LEAST_SHARE * seconds)
            self._fit.observe(step.prompts, seconds)
        return 0.0

    def _expected(self, step: StepBegun) -> float:
        """How many seconds the step would have taken without loads; 0 if that is unknown."""
        prompts = 0.0 if self.cost is None else self.cost.seconds(step.prompts)
        return prompts + self.decode if step.decodes else max(prompts, self.decode)


def _size(tokens: int) -> int:
    """The size of a step of this many tokens. Between a power of two and the next there are four sizes, such as 513 to
    640 tokens. A power of two belongs to the size below it, because the largest graph often has that many tokens."""
    before = max(0, tokens - 1)
    dropped = max(0, before.bit_length() - 3)
    return before >> dropped << dropped


def _mean(before: float, new: float) -> float:
    return before + _NEW * (new - before) if before else new
