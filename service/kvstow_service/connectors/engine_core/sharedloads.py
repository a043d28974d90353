"""Requests that share a prefix: one of them loads it, the others wait for it and find it on the GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.stepplan import StepPlanner
from kvstow_service.connectors.engine_core.trackedrequests import Request, TrackedRequest

WAIT_SECONDS = 5.0
"""How long a request waits at most. All loads that fit into a GPU's cache together take less."""


@dataclass(slots=True, eq=False)
class SharedLoad:
    """A load of the request's tokens `start` to `end` that others may wait for. `done_in`: how many steps were planned
    when it was done; None before. `is_over`: it will put nothing into the GPU's cache that is not there yet."""

    request: Request
    start: int
    end: int
    done_in: int | None = None
    is_over: bool = False


class LoadWait(NamedTuple):
    """A request waits for `load`, which brings its tokens up to `end`, until the time `deadline`."""

    load: SharedLoad
    end: int
    deadline: float


class SharedLoads:
    """Decides which requests wait for the load of another one. Used by the scheduler's thread.

    vLLM puts loaded blocks into the GPU's prefix cache when it next schedules their request. A request that waited then
    finds them there, and loads only what comes after them.

    A wait may cost the request at most one step. Therefore a request waits once per admission: when its wait is over,
    however it has ended, it loads by itself. It waits only for a load that brings at least half of what it needs, and
    that is no longer than what it needs and what both share, together. Such a load ends in time even if the request's
    own load would get half of the link from now on.
    """

    def __init__(
        self, planner: StepPlanner, groups: KVGroups, clock: Callable[[], float], *, drafts: bool = False
    ) -> None:
        """`drafts`: see `VLLMProcess`."""
        self._planner, self._groups, self._clock = planner, groups, clock
        group = groups.groups[0]
        self._hash_tokens = group.block_tokens // group.hashes_per_block
        self._are_found = groups.is_plain or not drafts  # one block less, and the window before it was not loaded
        self._loads: dict[TrackedRequest, SharedLoad] = {}

    def must_wait(self, tracked: TrackedRequest, local: int, end: int) -> bool:
        """Whether the request, which could load its tokens `local` to `end`, waits for another one's load. O(1) for a
        request that waits or has waited, otherwise O(loads under way)."""
        if tracked.wait is None:
            tracked.wait = self._find(tracked.request, local, end)
            return tracked.wait is not None
        load, end, deadline = tracked.wait
        return not self._is_over(load) and load.start <= local < end and self._clock() < deadline

    def begun(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The load of the `num_tokens` tokens after `tracked.start` is planned."""
        end = (tracked.start + num_tokens) // self._groups.alignment * self._groups.alignment
        if self._are_found:
            self._loads[tracked] = SharedLoad(tracked.request, tracked.start, end)

    def done(self, tracked: TrackedRequest) -> None:
        """The load is done. vLLM has yet to schedule its request, but it may ask about others first."""
        if (load := self._loads.get(tracked)) is not None:
            load.done_in = self._planner.number

    def ended(self, tracked: TrackedRequest) -> None:
        """The load has failed, or its request continues or has ended. Idempotent."""
        if (load := self._loads.pop(tracked, None)) is not None:
            load.is_over = True

    def _is_over(self, load: SharedLoad) -> bool:
        return load.is_over or (load.done_in is not None and load.done_in < self._planner.number)

    def _find(self, request: Request, local: int, end: int) -> LoadWait | None:
        """The load that brings most of the request's tokens, if it is worth a wait."""
        best: LoadWait | None = None
        step, need = self._groups.alignment, end - local
        half = local + -(-need // (2 * step)) * step
        for load in self._loads.values():
            if self._is_over(load) or load.start > local or not self._share(request, load, half):
                continue
            shared = self._shared_end(request, load, half, end)
            is_short = load.end - load.start <= need + shared - local
            if shared >= half and is_short and (best is None or shared > best.end):
                best = LoadWait(load, shared, self._clock() + WAIT_SECONDS)
        return best

    def _shared_end(self, request: Request, load: SharedLoad, half: int, end: int) -> int:
        """Up to which token the load brings what the request needs, at `half` or later; 0 if that is not enough. If
        some layers need only a part of the prefix, the load brings what the token after its end reads, and no more."""
        step, most = self._groups.alignment, min(end, load.end)
        if not self._groups.is_plain:
            return most if most == load.end and self._share(request, load, most) else 0
        counts = range(1, (most - half) // step + 1)
        more = bisect_left(counts, x=True, key=lambda count: not self._share(request, load, half + step * count))
        return half + step * more

    def _share(self, request: Request, load: SharedLoad, num_tokens: int) -> bool:
        """Whether the load brings the last of these tokens, and both requests begin with all of them. Hashes are
        chained."""
        last = num_tokens // self._hash_tokens - 1
        ours, theirs = request.block_hashes, load.request.block_hashes
        return num_tokens <= load.end and last < min(len(ours), len(theirs)) and ours[last] == theirs[last]
