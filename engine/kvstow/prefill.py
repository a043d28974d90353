"""What it costs to compute prompts: seconds = a x tokens + b x tokens x context, fitted to the steps of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Half of all weight is at this value or a smaller one. `values`: each with its weight; one at least."""
    ascending = sorted(values)
    up_to = accumulate(weight for _, weight in ascending)
    half = sum(weight for _, weight in ascending) / 2
    return next(value for (value, _), so_far in zip(ascending, up_to, strict=True) if so_far >= half)


class PromptPart(NamedTuple):
    """Tokens of prompts. `context`: for each of them, how many tokens its prompt has before it, added up."""

    tokens: int = 0
    context: int = 0

    @classmethod
    def between(cls, start: int, end: int) -> PromptPart:
        """The tokens `start` to `end` of one prompt."""
        return cls(end - start, (end - start) * (start + end - 1) // 2)

    def with_part(self, other: PromptPart) -> PromptPart:
        return PromptPart(self.tokens + other.tokens, self.context + other.context)


class PrefillCost(NamedTuple):
    """Seconds for each token, and for each token of context of each token. `longest`: the longest context, as the mean
    over a step, in which this was measured; nothing is known of longer ones, so they cost no more."""

    per_token: float
    per_context: float = 0.0
    longest: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """In the middle of the contexts that were measured."""
        seconds = self.per_token + self.per_context * self.longest / 2
        return 1 / seconds if seconds else None

    def seconds(self, part: PromptPart) -> float:
        """To compute these tokens."""
        if not part.tokens:
            return 0.0
        return part.tokens * (self.per_token + self.per_context * min(part.context / part.tokens, self.longest))


class PrefillNews(NamedTuple):
    """What an engine tells of its prefills: their cost, how many tokens loads have brought since it told the last time,
    how long computing those would have taken, how long the engine has waited for loads, and how many loads it has not
    made because computing takes less time."""

    cost: PrefillCost
    hit_tokens: int = 0
    hit_seconds: float = 0.0
    waited: float = 0.0
    not_made: int = 0


_RECENT = 9
_LEAST_STEPS = 8
"""Fewer steps say nothing."""
_LEAST_OF_CLASS = 3
"""With fewer, the median may be the one step in which kernels were compiled."""
_SHORT = 512
"""Contexts below it are one class."""


class PrefillFit:
    """Fits the cost to the steps of an engine. Not locked. O(1) in memory and for each step.

    Divided by its tokens, the time of a step is a line over its mean context. The last steps are kept for each class of
    contexts, twice as long as those of the class before: traffic with short prompts alone does not displace what long
    ones have cost. A class counts with its median, so single steps that took longer, as for kernels that were compiled
    or a machine that was busy, change nothing.
    """

    def __init__(self) -> None:
        self.cost: PrefillCost | None = None
        """None before there were enough steps."""
        self._steps = 0
        self._classes: dict[int, deque[tuple[PromptPart, float]]] = {}
        self._medians: dict[int, tuple[float, float, float]] = {}
        """Of each class that counts: context, seconds for each token, and tokens."""

    def observe(self, part: PromptPart, seconds: float) -> None:
        """A step has computed these tokens in so many seconds."""
        if part.tokens <= 0 or seconds <= 0:
            return
        self._steps += 1
        number = max(_SHORT, int(part.context / part.tokens)).bit_length()
        steps = self._classes.setdefault(number, deque(maxlen=_RECENT))
        steps.append((part, seconds / part.tokens))
        if len(steps) >= _LEAST_OF_CLASS:
            self._medians[number] = (
                weighted_median((one.context / one.tokens, one.tokens) for one, _ in steps),
                weighted_median((cost, one.tokens) for one, cost in steps),
                sum(one.tokens for one, _ in steps),
            )
        if self._steps >= _LEAST_STEPS and self._medians:
            self.cost = self._line()

    def _line(self) -> PrefillCost:
        """The line with the least squares, as far as neither of its figures is negative."""
        points = self._medians.values()
        weight = sum(tokens for _, _, tokens in points)
        mean_x = sum(x * tokens for x, _, tokens in points) / weight
        mean_y = sum(y * tokens for _, y, tokens in points) / weight
        spread = sum((x - mean_x) ** 2 * tokens for x, _, tokens in points)
        slope = sum((x - mean_x) * (y - mean_y) * tokens for x, y, tokens in points) / spread if spread > 0 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return PrefillCost(mean_y - slope * mean_x, slope, max(x for x, _, _ in points))
