"""Which way a load goes: within the step that needs it, layer by layer, or before it, while other requests run.

A load by layer costs its request the longer of load and computation, where a load before the step costs their sum and
two more steps. Whatever else runs in that step waits for it, too: so it may add a bounded time to a step of others, and
of many loads at once only the first goes by layer, as the first of them would otherwise end with the last.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

LoadPath = Literal["auto", "layer", "async"]
LOAD_PATHS: tuple[LoadPath, ...] = get_args(LoadPath)

_FIRST_RATE = 20e9  # bytes a second, until a load was measured
_FIRST_DELAY = 0.005  # seconds, until a load before a step was measured
_NEW = 0.2  # weight of a new measurement
_STEPS = 8
_LEAST_BYTES = 16 << 20  # of a load whose rate is measured


class Choice(NamedTuple):
    by_layer: bool
    reason: str
    """setting, alone, budget, burst, whole_prompt, no_room, engine or rank"""

    @property
    def label(self) -> str:
        """One of `LOAD_CHOICES`."""
        return f"{'layer' if self.by_layer else 'async'}_{self.reason}"


class LoadPolicy:
    """Used by the scheduler's thread. O(1) for each choice.

    Where no load can go by layer, the reason is `setting` (the user wants none) or `engine` (this engine allows none).
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
    ) -> None:
        """`step_budget`: seconds that loads by layer may add to a step of other requests. `slot_bytes`: on the rank
        where they are largest. `is_possible`: whether this engine can load by layer. `block_tokens`: in a slot."""
        self._path, self._budget, self._slot_bytes, self._clock = path, step_budget, slot_bytes, clock
        self._is_possible, self._block_tokens = is_possible, block_tokens
        self.off: str | None = None
        """Why loads by layer are off on some rank."""
        self.counts: Counter[Choice] = Counter()
        """Loads that began, by how they went and why."""
        self._rate = _FIRST_RATE
        self._delay = _FIRST_DELAY  # of a load before the step, beside its copy
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds of the last ones
        self._tail_seconds: float | None = None  # of a step in which one request computes the rest of a block
        self._decode_seconds: float | None = None
        self._planned_at: float | None = None
        self._running: Mapping[str, int] = {}
        self._by_layer = self._queued = 0  # blocks: of the step that is being planned; of other loads under way
        self._waiting = 0  # blocks of loads by layer that wait for their slots, or for vLLM to ask for them
        self._had_layered = False

    def choose(self, request_id: str, num_blocks: int, *, is_whole: bool, had_no_room: bool = False) -> Choice:
        """For a load of so many blocks. `is_whole`: of the whole prompt, after which vLLM would have nothing to
        compute in this step. `had_no_room`: it was to go by layer, and vLLM had no blocks for the request."""
        if self._path == "async":
            return Choice(False, "setting")
        if not self._is_possible:
            return Choice(False, "engine")
        if self.off is not None:
            return Choice(False, "rank")
        if is_whole:
            return Choice(False, "whole_prompt")
        if had_no_room:
            return Choice(False, "no_room")
        if self._path == "layer":
            return Choice(True, "setting")
        others = len(self._running) - (request_id in self._running)
        before = self._by_layer + self._queued + self._waiting
        if not others and not before:
            return Choice(True, "alone")
        seconds = (num_blocks + before) * self._slot_bytes / self._rate
        hidden = min(self._steps, default=0.0) if others else 0.0  # a step of others lasts so long anyway
        if self._budget and seconds - hidden <= self._budget:
            return Choice(True, "budget")
        return Choice(False, "burst" if before else "budget")

    @property
    def loads_last_block(self) -> bool:
        """Whether the last block of a prompt is loaded if it alone is missing: only if that, and a step that decodes,
        take less than a step that computes the block's tokens. Not before both kinds of step were measured."""
        if self._tail_seconds is None or self._decode_seconds is None:
            return False
        load = self._delay + (1 + self._queued) * self._slot_bytes / self._rate
        return load + self._decode_seconds < self._tail_seconds

    def waits(self, num_blocks: int) -> None:
        """The slots of a load by layer were asked for before the load is promised to vLLM."""
        self._waiting += num_blocks

    def waits_no_more(self, num_blocks: int) -> None:
        """Such a load is planned, or given up."""
        self._waiting -= num_blocks

    def begun(self, choice: Choice, num_blocks: int) -> None:
        """A load has been planned."""
        self.counts[choice] += 1
        if choice.by_layer:
            self._by_layer += num_blocks
        else:
            self._queued += num_blocks

    def ended(self, num_blocks: int, seconds: float | None = None) -> None:
        """A load that does not go by layer has ended on all ranks, `seconds` after it had begun."""
        if seconds is not None:
            delay = seconds - self._queued * self._slot_bytes / self._rate  # the others share the link with it
            self._delay += _NEW * (max(0.0, delay) - self._delay)
        self._queued -= num_blocks

    def measured(self, num_bytes: int, seconds: float) -> None:
        """A load on some rank was so fast."""
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            self._rate += _NEW * (num_bytes / seconds - self._rate)

    @property
    def layer_seconds(self) -> float:
        """How long the loads by layer take of the step that is being planned."""
        return self._by_layer * self._slot_bytes / self._rate

    def planned(self, running: Mapping[str, int]) -> None:
        """A step was planned: how many tokens it computes of each request."""
        now, before = self._clock(), self._planned_at
        if self._running and before is not None:
            seconds = now - before
            self._steps.append(seconds)
            if not self._had_layered and self._running.keys() & running.keys():  # the engine was not idle in between
                self._note_step(seconds)
        self._planned_at, self._running = now, dict(running)
        self._had_layered, self._by_layer = self._by_layer > 0, 0

    def finished(self, request_id: str) -> None:
        if request_id in self._running:
            self._running = {name: count for name, count in self._running.items() if name != request_id}

    def _note_step(self, seconds: float) -> None:
        most = max(self._running.values())
        if most == 1:
            self._decode_seconds = _mean(self._decode_seconds, seconds)
        elif most <= self._block_tokens:
            self._tail_seconds = _mean(self._tail_seconds, seconds)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW * (new - before)
