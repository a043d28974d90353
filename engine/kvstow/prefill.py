"""What it costs to compute prompts: seconds = a x tokens + b x tokens x context, fitted to the steps of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

_RECENT = 9
"""How many steps of each class of contexts are kept."""
_LEAST_STEPS = 8
"""How many steps are needed before there is a cost."""
_LEAST_OF_CLASS = 3
"""How many steps a class needs to count. With fewer, its median may be the step in which kernels were compiled."""
_SHORT = 512
"""Contexts of fewer tokens are one class."""


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that it and smaller ones have half of all weight. `values`: pairs of a value and its
    weight, at least one."""
    ascending = sorted(values)
    up_to = accumulate(weight for _, weight in ascending)
    half = sum(weight for _, weight in ascending) / 2
    return next(value for (value, _), so_far in zip(ascending, up_to, strict=True) if so_far >= half)


class PromptPart(NamedTuple):
    """Tokens of prompts. `context`: the sum, over these tokens, of how many tokens the prompt has before each."""

    tokens: int = 0
    context: int = 0

    @classmethod
    def between(cls, start: int, end: int) -> PromptPart:
        """The tokens `start` to `end` of one prompt."""
        return cls(end - start, (end - start) * (start + end - 1) // 2)

    def with_part(self, other: PromptPart) -> PromptPart:
        return PromptPart(self.tokens + other.tokens, self.context + other.context)


class PrefillCost(NamedTuple):
    """The cost of computing prompts. `per_token`: seconds for each token. `per_context`: seconds for each token of its
    context. `longest`: the longest mean context of a step in which this was measured. Longer contexts count as this
    one, because nothing is known of them."""

    per_token: float
    per_context: float = 0.0
    longest: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """The rate at half of the longest context; None if the cost is 0."""
        seconds = self.per_token + self.per_context * self.longest / 2
        return 1 / seconds if seconds else None

    def seconds(self, part: PromptPart) -> float:
        """The time to compute these tokens."""
        if not part.tokens:
            return 0.0
        return part.tokens * (self.per_token + self.per_context * min(part.context / part.tokens, self.longest))


class PrefillNews(NamedTuple):
    """What an engine reports of its prefills. `cost` is the cost of computing them. The other figures are since its
    last report: the tokens that loads have brought, how many seconds computing them would have taken, how many seconds
    the engine has waited for loads, and how many loads it has not made because computing takes less time."""

    cost: PrefillCost
    hit_tokens: int = 0
    hit_seconds: float = 0.0
    waited: float = 0.0
    not_made: int = 0


class _Medians(NamedTuple):
    """The steps of one class: their median context for each token, the median seconds for a token, and their tokens."""

    context: float
    seconds: float
    tokens: int


class PrefillFit:
    """Fits the cost to the steps of an engine. Not locked. O(1) in memory and for each step.

    The time of a step, divided by its tokens, is a linear function of its mean context. Contexts form classes, each
    twice as long as the one before, and the last steps of each class are kept, so that traffic of short prompts does
    not displace what long ones have cost. A class counts with its median, so single steps that took longer, because
    kernels were compiled or the machine was busy, change nothing.
    """

    def __init__(self) -> None:
        self.cost: PrefillCost | None = None
        """The fitted cost; None until there are enough steps."""
        self._steps = 0
        self._classes: dict[int, deque[tuple[PromptPart, float]]] = {}
        self._medians: dict[int, _Medians] = {}
        """The medians of each class that counts."""

    def observe(self, part: PromptPart, seconds: float) -> None:
        """Note that a step has computed these tokens in this time."""
        if part.tokens <= 0 or seconds <= 0:
            return
        self._steps += 1
        number = max(_SHORT, int(part.context / part.tokens)).bit_length()
        steps = self._classes.setdefault(number, deque(maxlen=_RECENT))
        steps.append((part, seconds / part.tokens))
        if len(steps) >= _LEAST_OF_CLASS:
            self._medians[number] = _Medians(
                weighted_median((one.context / one.tokens, one.tokens) for one, _ in steps),
                weighted_median((cost, one.tokens) for one, cost in steps),
                sum(one.tokens for one, _ in steps),
            )
        if self._steps >= _LEAST_STEPS and self._medians:
            self.cost = self._line()

    def _line(self) -> PrefillCost:
        """The least-squares line through the classes, limited so that neither of its figures is negative."""
        points = self._medians.values()
        weight = sum(tokens for _, _, tokens in points)
        mean_x = sum(x * tokens for x, _, tokens in points) / weight
        mean_y = sum(y * tokens for _, y, tokens in points) / weight
        spread = sum((x - mean_x) ** 2 * tokens for x, _, tokens in points)
        slope = sum((x - mean_x) * (y - mean_y) * tokens for x, y, tokens in points) / spread if spread > 0 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return PrefillCost(mean_y - slope * mean_x, slope, max(x for x, _, _ in points))
