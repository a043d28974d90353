"""Chooses the way of each load: by layer, within the step that computes with it, or before that step, while other
requests run. It also tracks what it costs the engine to compute prompts, what loads have saved it, and how long it has
waited for them.

With a load by layer, a request waits for the longer of load and computation. With a load before the step, it waits for
their sum, and for the time that it takes to begin the load and to notice its end. Both times are estimated for every
load, each with the rate that loads of its kind have had, because these rates differ by half on some hosts. All other
requests of the step wait for a load by layer, too. So it may add only a bounded time to a step of others. If others
wait to be scheduled, no long load goes by layer, because the first of them would end with the last.

A request that is alone computes its prefix if that takes no longer than loading it. However few tokens a step has, it
takes as long as its launch. The step that computes the whole prompt may be larger than all CUDA graphs where the step
after the load is not, so steps of each size have a launch of their own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from kvstow.prefill import PrefillCost, PrefillNews, PromptPart
from kvstow_service.connectors.engine_core.enginetimes import LoadTimes, StepBegun, StepTimes
from kvstow_service.connectors.engine_core.trackedrequests import Choice, TrackedRequest

LoadPath = Literal["auto", "layer", "async"]
LOAD_PATHS: tuple[LoadPath, ...] = get_args(LoadPath)

_LAYER_DELAY = 0.001
"""How many seconds the host needs to begin a load by layer."""
_NOTHING = PromptPart()
LEAST_TOKENS = 256
"""How many prompt tokens a step must compute to show what they cost. If a step can have fewer than twice as many
tokens, half of its limit is enough."""


class LoadPolicy:
    """Chooses the way of each load. Used by the scheduler's thread. O(1) for each choice, O(requests) for each step.

    If no load can go by layer, the reason is `setting` (the user wants none) or `engine` (this engine allows none).

    Tokens that were loaded or found on the GPU are not computed, so they do not count. The engine counts as waiting
    while a load before the step is under way and no step is, because other requests that run hide the load.
    """

    def __init__(
        self,
        path: LoadPath,
        step_budget: float,
        slot_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_possible: bool = True,
        block_tokens: int = 16,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """`step_budget`: seconds that loads by layer may add to a step of other requests. `slot_bytes`: bytes of a slot
        on the rank where slots are largest. `is_possible`: whether this engine can load by layer. `block_tokens`:
        tokens in a slot."""
        self._path, self._budget, self._clock, self._is_possible = path, step_budget, clock, is_possible
        self._loads, self._steps = LoadTimes(slot_bytes, clock), StepTimes(block_tokens, least_tokens)
        self.requests: Mapping[str, TrackedRequest] = {}
        """The requests that vLLM has, by name."""
        self.off: str | None = None
        """Why loads by layer are off on some rank; None if they are off on none."""
        self.counts: Counter[Choice] = Counter()
        """How many loads began, by the choice made for them."""
        self._not_made, self._computed = 0, ""
        """How many loads were not made because computing takes less time, since the last news, and the name of the last
        request for which that was decided."""
        self._running: set[str] = set()
        self._by_layer = self._queued = 0  # blocks of loads by layer in the step being planned, and of loads before it
        self._waiting = 0  # blocks of loads by layer that wait for their slots, or for vLLM to ask for them
        self._seen_at = 0.0  # waiting for loads is counted up to this moment
        self._told: PrefillCost | None = None  # the cost in the last news
        self._hits, self._waited = PromptPart(), 0.0  # since the last news

    # -- the choice -----------------------------------------------------------------------------------------

    def choose(
        self,
        request_id: str,
        num_blocks: int,
        *,
        is_whole: bool,
        had_no_room: bool = False,
        rest: PromptPart = _NOTHING,
    ) -> Choice:
        """Choose the way of a load of `num_blocks` blocks. `rest`: the tokens that are computed after it. `is_whole`:
        whether it loads the whole prompt, so that vLLM would have nothing to compute in this step. `had_no_room`:
        whether it was promised by layer before, and vLLM had no blocks for the request."""
        obstacles = {
            "setting": self._path == "async",
            "engine": not self._is_possible,
            "rank": self.off is not None,
            "whole_prompt": is_whole,
            "no_room": had_no_room,
        }
        for reason, is_there in obstacles.items():
            if is_there:
                return Choice(False, reason)
        return Choice(True, "setting") if self._path == "layer" else self._faster(request_id, num_blocks, rest)

    def _faster(self, request_id: str, num_blocks: int, rest: PromptPart) -> Choice:
        others, before = len(self._running) - (request_id in self._running), self._blocks_before
        hidden = self._steps.shortest if others else 0.0  # a step of others takes this time anyway
        step, blocks = max(hidden, self._steps.seconds(rest)), num_blocks + before
        by_layer, whole = (self._loads.seconds(blocks, by_layer=way) for way in (True, False))
        is_slower = self._loads.delay + whole + step < max(step, by_layer) + _LAYER_DELAY
        if not self._is_alone(request_id):
            if not self._budget or by_layer - hidden > self._budget:
                return Choice(False, "budget" if others and not before else "burst")
            return Choice(False, "rate") if is_slower else Choice(True, "budget")
        if by_layer > step and self._loads.needs_whole(num_blocks):
            return Choice(False, "trial")
        if not is_slower:
            return Choice(True, "alone")
        return Choice(True, "trial") if self._loads.needs_layers(num_blocks) else Choice(False, "rate")

    def is_worth_it(
        self, request_id: str, choice: Choice, num_blocks: int, prompt: PromptPart, rest: PromptPart
    ) -> bool:
        """Whether to load `num_blocks` blocks and then compute the `rest`, instead of computing all of the `prompt`.
        True if other requests run, because they would wait for the computation, too. `choice`: the way of this
        load."""
        if self._path != "auto" or self._steps.cost is None or not self._is_alone(request_id):
            return True
        step, load = self._steps.seconds(rest), self._loads.seconds(num_blocks, by_layer=choice.by_layer)
        hit = max(step, load) + _LAYER_DELAY if choice.by_layer else self._loads.delay + load + step
        if hit < self._steps.seconds(prompt):
            return True
        if request_id != self._computed:  # vLLM asks again if it has no room for the request
            self._computed = request_id
            self._not_made += 1
        return False

    def _is_alone(self, request_id: str) -> bool:
        """Whether no other request runs, waits to be scheduled or is being loaded."""
        with_it = request_id in self.requests or request_id in self._running
        everything = max(len(self.requests), len(self._running))
        return everything <= with_it and not self._blocks_before

    @property
    def _blocks_before(self) -> int:
        """The number of blocks of all loads that share the link with the next one."""
        return self._by_layer + self._queued + self._waiting

    @property
    def loads_last_block(self) -> bool:
        """Whether to load the last block of a prompt if only that one is missing. This is so if the load and a step
        that decodes take less time than a step that computes the block's tokens. False until both kinds of steps are
        measured."""
        steps = self._steps
        if not steps.tail or not steps.decode:
            return False
        load = self._loads.seconds(1 + self._queued, by_layer=False)
        return self._loads.delay + load + steps.decode < steps.tail

    # -- loads ----------------------------------------------------------------------------------------------

    def waits(self, num_blocks: int) -> None:
        """Note that slots were requested for a load by layer of `num_blocks` blocks, before the load is promised to
        vLLM. When it is planned or given up, `num_blocks` is negative."""
        self._waiting += num_blocks

    def begun(self, choice: Choice, num_blocks: int) -> None:
        self.counts[choice] += 1
        if choice.by_layer:
            self._by_layer += num_blocks
            if choice.reason == "trial":
                self._loads.trying_layers()
        else:
            self._look()
            self._queued += num_blocks

    def ended(self, num_blocks: int, seconds: float | None = None) -> None:
        """Note that a load before the step has ended on all ranks, `seconds` after its begin; None if it has failed."""
        self._look()
        if seconds is not None:
            self._loads.has_taken(seconds, self._queued)  # the others share the link with it
        self._queued -= num_blocks

    def measured(self, num_bytes: int, seconds: float, *, by_layer: bool) -> None:
        """Note how long a load on some rank took."""
        self._loads.measured(num_bytes, seconds, by_layer=by_layer)

    def loaded(self, tokens: PromptPart) -> None:
        self._hits = self._hits.with_part(tokens)

    def _look(self) -> float:
        """Count the time since the last call as waiting, if the engine has waited for loads. Returns the time now."""
        now = self._clock()
        if self._queued and not self._steps.is_under_way:
            self._waited += now - self._seen_at
        self._seen_at = now
        return now

    # -- steps ----------------------------------------------------------------------------------------------

    def planned(self, number: int, step: Any) -> bool:
        """Note that a step is planned. Steps have ascending numbers. `step`: vLLM's `SchedulerOutput`, before vLLM
        counts its tokens as computed. Returns whether `step_ended` must be called, which is not so for steps that
        compute nothing."""
        scheduled: Mapping[str, int] = step.num_scheduled_tokens
        load_seconds = self._loads.seconds(self._by_layer, by_layer=True)
        self._by_layer, self._running = 0, set(scheduled)
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
        most, decodes = max(scheduled.values()), total > prompts.tokens
        self._steps.planned(StepBegun(number, self._look(), prompts, decodes, most, load_seconds))
        return True

    def step_ended(self, number: int) -> None:
        now = self._look()
        self._waited += self._steps.ended(number, now)

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def take_news(self) -> PrefillNews | None:
        """What is new since the last call, for the control plane. None if nothing is new, or while the cost of prompts
        is unknown."""
        cost = self._steps.cost
        if cost is None or (cost == self._told and not (self._hits.tokens or self._waited or self._not_made)):
            return None
        news = PrefillNews(cost, self._hits.tokens, cost.seconds(self._hits), self._waited, self._not_made)
        self._told, self._hits, self._waited, self._not_made = cost, PromptPart(), 0.0, 0
        return news
