"""Which way a load goes: within the step that needs it, layer by layer, or before it, while other requests run. And
what it costs the engine to compute prompts, what loads have saved it, and how long it has waited for them.

A load by layer costs its request the longer of load and computation, where a load before the step costs their sum and
what it takes to begin it and to notice its end. Both are estimated for every load, each with the rate that loads of its
kind had: on some hosts they differ by half. Whatever else runs in that step waits for it, too: so it may add a bounded
time to a step of others, and where others wait to be scheduled no long load goes by layer, as the first of them would
otherwise end with the last.

Alone, a request whose prefix is computed in the time that its load would take computes it: a step takes as long as its
launch however few tokens it has.
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

_LAYER_DELAY = 0.001  # seconds of the host to begin a load by layer
_NOTHING = PromptPart()
LEAST_TOKENS = 256
"""How many prompt tokens a step must compute to show what they cost. If a step can have fewer than twice as many
tokens, half of its limit is enough."""


class LoadPolicy:
    """Used by the scheduler's thread. O(1) for each choice, O(requests) for each step.

    Where no load can go by layer, the reason is `setting` (the user wants none) or `engine` (this engine allows none).

    Tokens that were loaded or found on the GPU are not computed, and do not count. The engine waits for loads before
    the step while any is under way and no step is: other requests that run meanwhile hide it.
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
        """`step_budget`: seconds that loads by layer may add to a step of other requests. `slot_bytes`: on the rank
        where they are largest. `is_possible`: whether this engine can load by layer. `block_tokens`: in a slot."""
        self._path, self._budget, self._clock, self._is_possible = path, step_budget, clock, is_possible
        self._loads, self._steps = LoadTimes(slot_bytes, clock), StepTimes(block_tokens, least_tokens)
        self.requests: Mapping[str, TrackedRequest] = {}
        """Those that vLLM has, by name."""
        self.off: str | None = None
        """Why loads by layer are off on some rank."""
        self.counts: Counter[Choice] = Counter()
        """Loads that began, by how they went and why."""
        self._not_made, self._computed = 0, ""
        """Loads that would have taken longer than computing, not told yet; and the last request that was computed."""
        self._running: set[str] = set()
        self._by_layer = self._queued = 0  # blocks: of the step that is being planned; of other loads under way
        self._waiting = 0  # blocks of loads by layer that wait for their slots, or for vLLM to ask for them
        self._seen_at = 0.0  # until then, waiting was counted
        self._told: PrefillCost | None = None
        self._hits, self._waited = PromptPart(), 0.0  # not told yet

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
        """For a load of so many blocks. `rest`: what is computed behind it. `is_whole`: of the whole prompt, after
        which vLLM would have nothing to compute in this step. `had_no_room`: it was to go by layer, and vLLM had no
        blocks for the request."""
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
        hidden = self._steps.shortest if others else 0.0  # a step of others lasts so long anyway
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
        """Whether to load so many blocks, of all that the request has to compute, `prompt`, and then compute the
        `rest`. Beside others always, since the computation would be theirs as well. `choice`: of this load."""
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
        """Of loads that share the link with the next one."""
        return self._by_layer + self._queued + self._waiting

    @property
    def loads_last_block(self) -> bool:
        """Whether the last block of a prompt is loaded if it alone is missing: only if that, and a step that decodes,
        take less than a step that computes the block's tokens. Not before both kinds of step were measured."""
        steps = self._steps
        if not steps.tail or not steps.decode:
            return False
        load = self._loads.seconds(1 + self._queued, by_layer=False)
        return self._loads.delay + load + steps.decode < steps.tail

    # -- loads ----------------------------------------------------------------------------------------------

    def waits(self, num_blocks: int) -> None:
        """The slots of a load by layer were asked for before the load is promised to vLLM. Once it is planned or given
        up, `num_blocks` is negative."""
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
        """A load that does not go by layer has ended on all ranks, `seconds` after it had begun."""
        self._look()
        if seconds is not None:
            self._loads.has_taken(seconds, self._queued)  # the others share the link with it
        self._queued -= num_blocks

    def measured(self, num_bytes: int, seconds: float, *, by_layer: bool) -> None:
        """A load on some rank was so fast."""
        self._loads.measured(num_bytes, seconds, by_layer=by_layer)

    def loaded(self, tokens: PromptPart) -> None:
        self._hits = self._hits.with_part(tokens)

    def _look(self) -> float:
        """Count the time since the last look, if the engine has waited since. Returns the time."""
        now = self._clock()
        if self._queued and not self._steps.is_under_way:
            self._waited += now - self._seen_at
        self._seen_at = now
        return now

    # -- steps ----------------------------------------------------------------------------------------------

    def planned(self, number: int, step: Any) -> bool:
        """Steps have ascending numbers. `step`: vLLM's `SchedulerOutput`, before vLLM counts its tokens as computed.
        Returns whether `step_ended` is to be called: not for steps that compute nothing."""
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
        self._waited += self._steps.ended(number, self._look())

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def take_news(self) -> PrefillNews | None:
        """For the control plane: what is new since the last call; None while it is not known what prompts cost."""
        cost = self._steps.cost
        if cost is None or (cost == self._told and not (self._hits.tokens or self._waited or self._not_made)):
            return None
        news = PrefillNews(cost, self._hits.tokens, cost.seconds(self._hits), self._waited, self._not_made)
        self._told, self._hits, self._waited, self._not_made = cost, PromptPart(), 0.0, 0
        return news
