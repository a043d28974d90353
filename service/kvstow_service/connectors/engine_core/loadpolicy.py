"""Which way a load goes: within the step that needs it, layer by layer, or before it, while other requests run.

A load by layer costs its request the longer of load and computation, where a load before the step costs their sum and
two more steps. Whatever else runs in that step waits for it, too: so it may add a bounded time to a step of others, and
of many loads at once only the first goes by layer, as the first of them would otherwise end with the last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, get_args

LoadPath = Literal["auto", "layer", "async"]
LOAD_PATHS: tuple[LoadPath, ...] = get_args(LoadPath)

_FIRST_RATE = 20e9  # bytes a second, until a load was measured
_NEW = 0.2  # weight of a new measurement
_LEAST_BYTES = 16 << 20  # of a load whose rate is measured


class Choice(NamedTuple):
    by_layer: bool
    reason: str
    """setting, alone, budget, burst, whole_prompt or rank"""


class LoadPolicy:
    """Used by the scheduler's thread. O(1) for each choice."""

    def __init__(
        self, path: LoadPath, step_budget: float, slot_bytes: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`step_budget`: seconds that loads by layer may add to a step of other requests. `slot_bytes`: on the rank
        where they are largest."""
        self._path, self._budget, self._slot_bytes, self._clock = path, step_budget, slot_bytes, clock
        self.off: str | None = None
        """Why loads by layer are off on some rank."""
        self.counts: Counter[Choice] = Counter()
        """Loads that began, by how they went and why."""
        self._rate = _FIRST_RATE
        self._step_seconds = 0.0
        self._planned_at: float | None = None
        self._running: set[str] = set()
        self._by_layer = self._queued = 0  # blocks: of the step that is being planned; of other loads under way

    def choose(self, request_id: str, num_blocks: int, *, is_whole: bool) -> Choice:
        """For a load of so many blocks. `is_whole`: of the whole prompt, after which vLLM would have nothing to
        compute in this step."""
        if self._path == "async":
            return Choice(False, "setting")
        if self.off is not None:
            return Choice(False, "rank")
        if is_whole:
            return Choice(False, "whole_prompt")
        if self._path == "layer":
            return Choice(True, "setting")
        others = len(self._running) - (request_id in self._running)
        if not others and not self._by_layer and not self._queued:
            return Choice(True, "alone")
        seconds = (num_blocks + self._by_layer + self._queued) * self._slot_bytes / self._rate
        if self._budget and seconds - self._step_seconds <= self._budget:
            return Choice(True, "budget")
        return Choice(False, "burst" if self._by_layer or self._queued else "budget")

    def begun(self, choice: Choice, num_blocks: int) -> None:
        """A load has been planned."""
        self.counts[choice] += 1
        if choice.by_layer:
            self._by_layer += num_blocks
        else:
            self._queued += num_blocks

    def ended(self, num_blocks: int) -> None:
        """A load that does not go by layer has ended on all ranks."""
        self._queued -= num_blocks

    def measured(self, num_bytes: int, seconds: float) -> None:
        """A load on some rank was so fast."""
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            self._rate += _NEW * (num_bytes / seconds - self._rate)

    def planned(self, running: Collection[str]) -> None:
        """A step was planned, for these requests."""
        now, before = self._clock(), self._planned_at
        if self._running and before is not None:
            self._step_seconds += _NEW * (now - before - self._step_seconds)
        self._planned_at, self._running, self._by_layer = now, set(running), 0

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)
