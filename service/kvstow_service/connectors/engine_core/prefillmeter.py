"""What it costs the engine to compute prompts, what loads have saved it, and how long it has waited for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstow.prefill import PrefillCost, PrefillFit, PrefillNews, PromptPart
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

LEAST_TOKENS = 256
"""How many prompt tokens a step must compute to show what they cost. If a step can have fewer than twice as many
tokens, half of its limit is enough."""
_WEIGHT = 0.2
"""The weight of the newest step that only decodes."""
_LEAST_SHARE = 0.5
"""The least share of its time with which a step that also decodes counts."""


class _Planned(NamedTuple):
    number: int
    at: float
    prompts: PromptPart
    decodes: bool
    load_seconds: float


class PrefillMeter:
    """Times steps. Used by the scheduler's thread. O(1) if all requests decode, otherwise O(requests of the step).

    Tokens that were loaded or found on the GPU are not computed, and do not count. A step begins when it is planned. If
    vLLM plans ahead, it begins when the step before it has ended. From the time of a step that also decodes, the time
    of a step that only decodes is subtracted: without the prompts, it would have taken that. Steps of few tokens take
    as long as their launch, so they show no cost.

    The engine waits for loads before the step while any is under way and no step is: other requests that run meanwhile
    hide it. It waits for loads by layer as long as their step takes longer than it would without them, at most as long
    as the loads take.
    """

    def __init__(self, least_tokens: int = LEAST_TOKENS, clock: Callable[[], float] = time.perf_counter) -> None:
        self.requests: Mapping[str, TrackedRequest] = {}
        """Those that vLLM has, by name."""
        self._least_tokens, self._clock = least_tokens, clock
        self._fit = PrefillFit()
        self._planned: deque[_Planned] = deque()
        self._last_end = 0.0
        self._decode_seconds = 0.0
        self._loads = 0  # before their step, under way
        self._seen_at = 0.0  # until then, waiting was counted
        self._told: PrefillCost | None = None
        self._hits, self._waited = PromptPart(), 0.0  # not told yet

    # -- steps ----------------------------------------------------------------------------------------------

    def planned(self, number: int, step: Any, load_seconds: float = 0.0) -> bool:
        """Steps have ascending numbers. `step`: vLLM's `SchedulerOutput`, before vLLM counts its tokens as computed.
        `load_seconds`: how long the loads by layer within this step take. Returns whether `ended` is to be called: not
        for steps that compute nothing."""
        scheduled: Mapping[str, int] = step.num_scheduled_tokens
        if not scheduled:
            return False
        drafts: Mapping[str, Any] = getattr(step, "scheduled_spec_decode_tokens", None) or {}
        total, prompts = getattr(step, "total_num_scheduled_tokens", None), PromptPart()
        if total != len(scheduled):
            total = sum(scheduled.values())
            for name, count in scheduled.items():
                if count > 1 + (len(drafts.get(name, ())) if drafts else 0):
                    tracked = self.requests.get(name)
                    start = 0 if tracked is None else tracked.request.num_computed_tokens
                    prompts = prompts.with_part(PromptPart.between(start, start + count))
        now = self._look()
        self._planned.append(_Planned(number, now, prompts, total > prompts.tokens, load_seconds))
        return True

    def ended(self, number: int) -> None:
        """The step has ended."""
        now, planned = self._look(), self._planned
        while planned and planned[0].number < number:
            planned.popleft()
        if not planned or planned[0].number != number:
            return
        step = planned.popleft()
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        if step.load_seconds:
            self._waited += min(step.load_seconds, max(0.0, seconds - self._expected(step)))
        elif not step.prompts.tokens:
            known = self._decode_seconds
            self._decode_seconds = (1 - _WEIGHT) * known + _WEIGHT * seconds if known else seconds
        elif step.prompts.tokens >= self._least_tokens:
            if step.decodes:
                seconds = max(seconds - self._decode_seconds, _LEAST_SHARE * seconds)
            self._fit.observe(step.prompts, seconds)

    def _expected(self, step: _Planned) -> float:
        """How long the step would have taken without loads; 0 if that is not known."""
        cost = self._fit.cost
        prompts = 0.0 if cost is None else cost.seconds(step.prompts)
        return prompts + self._decode_seconds if step.decodes else max(prompts, self._decode_seconds)

    # -- loads ----------------------------------------------------------------------------------------------

    def load_began(self) -> None:
        """A load before its step."""
        self._look()
        self._loads += 1

    def load_ended(self) -> None:
        self._look()
        self._loads -= 1

    def loaded(self, tokens: PromptPart) -> None:
        """A load has brought these tokens."""
        self._hits = self._hits.with_part(tokens)

    def _look(self) -> float:
        """Count the time since the last look, if the engine has waited since. Returns the time."""
        now = self._clock()
        if self._loads and not self._planned:
            self._waited += now - self._seen_at
        self._seen_at = now
        return now

    # -- for the control plane ------------------------------------------------------------------------------

    def take_news(self) -> PrefillNews | None:
        """What is new since the last call; None while it is not known what prompts cost."""
        cost = self._fit.cost
        if cost is None or (cost == self._told and not self._hits.tokens and not self._waited):
            return None
        news = PrefillNews(cost, self._hits.tokens, cost.seconds(self._hits), self._waited)
        self._told, self._hits, self._waited = cost, PromptPart(), 0.0
        return news
