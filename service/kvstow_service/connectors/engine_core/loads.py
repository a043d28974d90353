"""Loads: how many of a request's tokens the pool has, and the copies into the request's GPU blocks.

Requests that share a prefix load it once: one of them loads it, and the others wait for it and find it on the GPU.
`FailedLoads` deals with failed loads that the engine cannot handle itself."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstow.errors import LeaseError
from kvstow.messages import Op
from kvstow.prefill import PromptPart
from kvstow.results import Awaited
from kvstow_service.connectors.engine_core.controlplane import LATER, ControlPlane, Later
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.offloadmetrics import Observe
from kvstow_service.connectors.engine_core.stepplan import StepDraft
from kvstow_service.connectors.engine_core.trackedrequests import (
    BegunLoad,
    Choice,
    Hit,
    LoadWait,
    Request,
    SharedLoad,
    TrackedRequest,
)

WAIT_SECONDS = 5.0
"""How many seconds a request waits at most. All loads that fit into a GPU's cache together take less."""


class SharedLoads:
    """Decides which requests wait for the load of another one. Used by the scheduler's thread.

    vLLM puts loaded blocks into the GPU's prefix cache when it next schedules their request. A request that waited then
    finds them there, and loads only what comes after them.

    A wait may cost the request at most one step. Therefore a request waits once per admission: when its wait is over,
    however it has ended, it loads by itself. It waits only for a load that brings at least half of the tokens that it
    needs, and that is no longer than these tokens plus the tokens that both loads share. Waiting for such a load and
    then loading the rest takes no longer than loading everything over half of the link.
    """

    def __init__(self, draft: StepDraft, groups: KVGroups, clock: Callable[[], float], *, drafts: bool = False) -> None:
        """`drafts`: see `VLLMProcess`."""
        self._draft, self._groups, self._clock = draft, groups, clock
        group = groups.groups[0]
        self._hash_tokens = group.block_tokens // group.hashes_per_block
        self._are_found = groups.is_plain or not drafts  # vLLM drops a block, and the window before it is not loaded
        self._loads: dict[TrackedRequest, SharedLoad] = {}

    def must_wait(self, tracked: TrackedRequest, local: int, end: int) -> bool:
        """Whether the request, which could load its tokens `local` to `end`, waits for another one's load. O(1) for a
        request that waits or has waited, otherwise O(loads under way)."""
        if tracked.load.wait is None:
            tracked.load.wait = self._find(tracked.request, local, end)
            return tracked.load.wait is not None
        load, end, deadline = tracked.load.wait
        return not self._is_over(load) and load.start <= local < end and self._clock() < deadline

    def begun(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Note that the load of the `num_tokens` tokens after `tracked.load.start` is planned."""
        end = (tracked.load.start + num_tokens) // self._groups.alignment * self._groups.alignment
        if self._are_found:
            self._loads[tracked] = SharedLoad(tracked.request, tracked.load.start, end)

    def done(self, tracked: TrackedRequest) -> None:
        """Note that the load is done. vLLM has yet to schedule its request, but it may ask about others first."""
        if (load := self._loads.get(tracked)) is not None:
            load.done_in = self._draft.number

    def ended(self, tracked: TrackedRequest) -> None:
        """Note that the load has failed, or that its request continues or has ended. Idempotent."""
        if (load := self._loads.pop(tracked, None)) is not None:
            load.is_over = True

    def _is_over(self, load: SharedLoad) -> bool:
        return load.is_over or (load.done_in is not None and load.done_in < self._draft.number)

    def _find(self, request: Request, local: int, end: int) -> LoadWait | None:
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
        """The token, at `half` or later, up to which the load brings what the request needs; 0 if it brings too little.
        If some layers need only a part of the prefix, the load brings only what the token after its own end reads."""
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


logger = logging.getLogger("kvstow.vllm")


class _Load(NamedTuple):
    """A load before the step, of these tokens into the blocks `targets`, which was requested at the time `at`."""

    tracked: TrackedRequest
    tokens: PromptPart
    targets: tuple[int, ...]
    answer: Awaited[Op | None]
    at: float


class Loads:
    """Looks requests up, holds the blocks that it finds, plans loads, and follows them. Used by the scheduler's thread.

    vLLM may ask about a request many times before it admits it, with a local prefix that changes. The request's hit is
    kept as long as it fits, so asking again costs O(1), and no block is held twice. A group that attends to all tokens
    needs all blocks of the hit. A group with a window needs the blocks that the next token reads. Blocks below the
    local prefix are already on the GPU.

    vLLM waits for a promised load until every rank has reported its end. Each `plan_load` therefore ends in exactly one
    report per rank: of its op, or of its loss. vLLM does not wait for a load by layer: the step that admits its request
    computes with it, so it has to begin at once.
    """

    def __init__(
        self,
        control: ControlPlane,
        draft: StepDraft,
        groups: KVGroups,
        null_block: int,
        observe: Observe,
        policy: LoadPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        drafts: bool = False,
    ) -> None:
        """`null_block` is the entry that stands in a block table for blocks outside the window. `observe` takes the
        time of each lookup. `drafts`: see `VLLMProcess`."""
        self._control, self._draft, self._groups = control, draft, groups
        self._null_block, self._observe = null_block, observe
        self._shared = SharedLoads(draft, groups, clock, drafts=drafts)
        self._finder = control.hit_finder(groups)
        self._asked: deque[_Load] = deque()  # loads that the pool has not agreed to yet
        self._under_way: dict[int, _Load] = {}  # by op
        self._policy, self._clock = policy, clock
        self._layered: dict[int, PromptPart] = {}  # tokens of the loads by layer under way, by op
        self._begun: dict[TrackedRequest, bool] = {}
        """Requests with a load that has begun, and whether vLLM has asked for the request in this step."""
        self._promised: list[TrackedRequest] = []  # requests whose load was promised to vLLM in this step
        self._unwanted: list[Awaited[Op | None]] = []  # loads by layer that were given up

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way or self._asked or self._layered)

    @property
    def are_awaited(self) -> bool:
        """Whether there are loads that the pool has not agreed to yet."""
        return bool(self._asked or self._unwanted)

    # -- lookup --------------------------------------------------------------------------------------------

    def expect(self, tracked: TrackedRequest) -> None:
        """Ask the node service, when the request arrives, for what `hold_hit` will return."""
        tracked.load.start = 0
        if (end := self._longest_end(tracked)) > 0:
            self._finder.expect(tracked, end)

    def hold_hit(self, tracked: TrackedRequest, local: int) -> int | None:
        """How many tokens after the first `local` can be loaded; they are held for the request. None if that is not
        known yet, or if the request waits for another one's load. A hit without blocks to load, as at the start of a
        chunk, counts as no hit, because vLLM waits for the end of each load. The load's `choice` says which way it
        would go."""
        tracked.load.start, tracked.load.choice = local, None
        if (begun := tracked.load.begun) is not None:
            if begun.start == local:
                return self._begun_hit(tracked, begun)
            self._drop_begun(tracked)
        hit, end = tracked.load.hit, self._longest_end(tracked)
        if local % self._groups.alignment or local >= end or self._is_computed(tracked, end):
            self.release_hit(tracked)
            return 0
        if hit is None or not hit.start <= local < hit.end or not self._finder.is_valid(hit):
            self._release_lease(tracked)
            found = self._look_up(tracked, local, end)
            if found is LATER:
                return None
            tracked.load.hit = hit = found
        if hit is None:
            return 0
        num_blocks, is_whole = (hit.end - local) // self._groups.alignment, hit.end >= tracked.request.num_tokens
        name, num_tokens = tracked.request.request_id, tracked.request.num_tokens
        rest = PromptPart.between(hit.end, num_tokens)
        tracked.load.choice = choice = self._policy.choose(
            name, num_blocks, is_whole=is_whole, had_no_room=tracked.load.had_no_room, rest=rest
        )
        if not self._policy.is_worth_it(name, choice, num_blocks, PromptPart.between(local, num_tokens), rest):
            tracked.load.choice = None
            self.release_hit(tracked)
            return 0
        if choice.by_layer:  # vLLM caches its blocks in this step, so there is no need to wait for others
            if self._control.begins_loads_at_once:
                return hit.end - local
            # If another request's load by layer waits for its slots, its blocks are on the GPU in the next step.
            return None if self._shared.must_wait(tracked, local, hit.end) else self._begin_early(tracked, hit, choice)
        return None if self._shared.must_wait(tracked, local, hit.end) else hit.end - local

    def _is_computed(self, tracked: TrackedRequest, end: int) -> bool:
        """Whether only the last block of the whole prompt is missing on the GPU, and computing it takes less time."""
        is_last = end == tracked.request.num_tokens and end - tracked.load.start == self._groups.alignment
        return is_last and not self._policy.loads_last_block

    def _begin_early(self, tracked: TrackedRequest, hit: Hit, choice: Choice) -> int | None:
        """Request the slots of a load by layer, before the GPU blocks of the load are known."""
        tracked.load.hit = None
        places = self._groups.places(tracked.load.start, hit.end)
        answer = self._begin_load(tracked, hit, hit.end, places, [-1] * len(places))
        if answer is None:
            return 0
        tracked.load.begun = begun = BegunLoad(tracked.load.start, hit, answer, choice, len(places), self._clock())
        self._policy.waits(begun.num_blocks)
        self._shared.begun(tracked, hit.end - tracked.load.start)
        return self._begun_hit(tracked, begun)

    def _begun_hit(self, tracked: TrackedRequest, begun: BegunLoad) -> int | None:
        """How many tokens the load brings; None while its slots are unknown, or while a rank might refuse it. A session
        begins only between two passes of vLLM's scheduler. So a rank that holds its gate refuses no load of the session
        that is current now."""
        self._begun[tracked] = True
        if not self._control.wait_for_slots(begun.answer):
            return None
        if begun.answer.value is None or not self._finder.is_valid(begun.hit):  # the session has ended
            self._drop_begun(tracked)
            return 0
        if not self._control.gates_are_held:  # the ranks say so after a step
            if self._clock() < begun.at + WAIT_SECONDS:
                return None
            self._drop_begun(tracked)
            return 0
        tracked.load.choice = begun.choice
        self._promised.append(tracked)
        return begun.hit.end - begun.start

    def _take_begun(self, tracked: TrackedRequest) -> BegunLoad | None:
        begun, tracked.load.begun = tracked.load.begun, None
        if begun is not None:
            del self._begun[tracked]
            self._shared.ended(tracked)
            self._policy.waits(-begun.num_blocks)
        return begun

    def _drop_begun(self, tracked: TrackedRequest) -> None:
        if (begun := self._take_begun(tracked)) is not None:
            self._unwanted.append(begun.answer)

    def drop_unused(self) -> None:
        """Give up loads by layer that this step does not use, once its requests have their blocks: loads for which vLLM
        had no blocks, and loads whose requests vLLM has not asked about. If they stayed, their slots would, too."""
        for tracked in self._promised:
            if tracked.load.begun is not None:
                tracked.load.had_no_room = True
                self._drop_begun(tracked)
        self._promised.clear()
        for tracked, is_asked_for in [*self._begun.items()]:
            self._begun[tracked] = False
            if not is_asked_for:
                self._drop_begun(tracked)
        unknown = []
        for answer in self._unwanted:
            if not answer.done:
                unknown.append(answer)
            elif answer.value is not None:
                self._draft.drop_load(answer.value)
        self._unwanted = unknown

    def count_hit(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Count the lookup of a request that is admitted, and that uses `num_tokens` of the tokens found."""
        end = self._longest_end(tracked)
        queried = end - tracked.load.start
        if queried > 0 and not self._is_computed(tracked, end):
            tracked.looked_up = tracked.looked_up or range(tracked.load.start, end)
            alignment = self._groups.alignment
            self._control.count_lookup(queried // alignment, num_tokens // alignment)

    def ended(self, tracked: TrackedRequest) -> None:
        """Note that the request continues without a load, or has ended."""
        self._shared.ended(tracked)
        self.release_hit(tracked)

    def release_hit(self, tracked: TrackedRequest) -> None:
        self._release_lease(tracked)
        self._drop_begun(tracked)
        self._end_deferral(tracked)
        self._finder.forget(tracked)

    def _release_lease(self, tracked: TrackedRequest) -> None:
        if tracked.load.hit is not None:
            self._control.release_lease(tracked.load.hit.lease)
            tracked.load.hit = None

    def _longest_end(self, tracked: TrackedRequest) -> int:
        """Where the longest hit beyond `tracked.load.start` would end.

        The last token is always computed. If the hit is the whole prompt, vLLM computes that token again. A step of one
        token decodes, which is faster than computing the token's block (27 ms instead of 37: H200, 8b of `bench.vllm`).
        With windows, that token may read one more block, so the hit ends before it.
        """
        num_tokens, alignment = tracked.request.num_tokens, self._groups.alignment
        end = (num_tokens - 1) // alignment * alignment
        if self._groups.is_plain and num_tokens % alignment == 0:
            return num_tokens
        return end

    def _look_up(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        begun = time.perf_counter()
        tracked.forget_stale_keys(self._groups)
        found = self._finder.find(tracked, local, end)
        self._observe("lookup_sync_delay_seconds", time.perf_counter() - begun)
        if found is not LATER:
            self._end_deferral(tracked)
        elif tracked.load.deferred_at is None:
            tracked.load.deferred_at = begun
        return found

    def _end_deferral(self, tracked: TrackedRequest) -> None:
        if tracked.load.deferred_at is not None:
            self._observe("lookup_async_delay_seconds", time.perf_counter() - tracked.load.deferred_at)
            tracked.load.deferred_at = None

    # -- load -----------------------------------------------------------------------------------------------

    def plan_load(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Load the `num_tokens` tokens after the load's `start` into the request's tables, the way that its `choice`
        says. Uses up the hit. Raises `LeaseError` if a load by layer is impossible."""
        hit, tracked.load.hit = tracked.load.hit, None
        begun, tracked.load.has_failed = self._take_begun(tracked), False
        end = tracked.load.start + num_tokens
        places = self._groups.places(tracked.load.start, end)
        targets = tuple([tracked.tables[group][number] for group, number in places])
        answer: Awaited[Op | None] | None = None
        if begun is not None:
            hit = begun.hit
            if (begun.start, hit.end) == (tracked.load.start, end) and self._null_block not in targets:
                answer = begun.answer
        elif hit is not None:
            answer = self._begin_load(tracked, hit, end, places, targets)
        tracked.load.fetched_tokens = 0 if hit is None else hit.fetched_tokens(tracked.load.start, end)
        choice = tracked.load.choice  # None: the request was not looked up
        if choice is not None and choice.by_layer:
            if end % self._groups.alignment or answer is None or not answer.done or answer.value is None:
                raise LeaseError(f"a load by layer cannot begin: {answer and answer.error}")
            self._draft.layered.append(replace(answer.value, blocks=targets))
            self._layered[answer.value.op_id] = PromptPart.between(tracked.load.start, end)
        elif choice is None or answer is None:
            self._lose(tracked, targets)
            return
        else:
            tokens = PromptPart.between(tracked.load.start, end)
            self._asked.append(_Load(tracked, tokens, targets, answer, time.perf_counter()))
            self._shared.begun(tracked, num_tokens)
        self._policy.begun(choice, len(targets))
        self.take_begun()

    def take_begun(self, *, wait: bool = False) -> None:
        """Plan the loads that the pool has agreed to since the last call. With `wait`, also wait for the other loads,
        as long as this step may wait. The pool answers them in the order in which they were asked for."""
        while self._asked:
            tracked, _, targets, answer, _ = load = self._asked[0]
            if not (self._control.wait(answer) if wait else answer.done):
                return
            self._asked.popleft()
            if (op := answer.value) is not None:
                self._draft.add_load(op, tracked.request.request_id)
                self._under_way[op.op_id] = load
            else:
                self._policy.ended(len(targets))
                logger.warning("request %s lost its hit and is computed: %s", tracked.request.request_id, answer.error)
                self._lose(tracked, targets)

    def lose_load(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Note that the load of the `num_tokens` tokens after `tracked.load.start` is impossible."""
        places = self._groups.places(tracked.load.start, tracked.load.start + num_tokens)
        self._lose(tracked, tuple([tracked.tables[group][number] for group, number in places]))

    def goes_by_layer(self, op_id: int) -> bool | None:
        """Whether this load goes by layer; None if the op is no load under way."""
        return True if op_id in self._layered else False if op_id in self._under_way else None

    def load_settled(self, op_id: int, *, failed: bool) -> None:
        """Note that a load has ended on every rank."""
        tokens = self._layered.pop(op_id, None)
        if (load := self._under_way.pop(op_id, None)) is not None:
            tracked, tokens, targets, _, at = load
            self._policy.ended(len(targets), None if failed else time.perf_counter() - at)
            tracked.load.has_failed = failed
            (self._shared.ended if failed else self._shared.done)(tracked)
        if tokens is not None and not failed:
            self._policy.loaded(tokens)

    def _lose(self, tracked: TrackedRequest, targets: tuple[int, ...]) -> None:
        tracked.load.has_failed = True
        self._shared.ended(tracked)
        self._draft.lost_loads[tracked.request.request_id] = targets

    def _begin_load(
        self, tracked: TrackedRequest, hit: Hit, end: int, places: list[tuple[int, int]], targets: Sequence[int]
    ) -> Awaited[Op | None] | None:
        """Ask the pool to begin the load. Returns None if the hit lacks a block that the request needs. Then nothing is
        held."""
        held = places
        if (tracked.load.start, end) != (hit.start, hit.end):
            held = self._groups.places(hit.start, hit.end)
        first = held.index(places[0]) if places and places[0] in held else len(held)
        if held[first : first + len(places)] == places and self._null_block not in targets:
            assert tracked.load.choice is not None  # made when the request was looked up
            name, choice = tracked.request.request_id, tracked.load.choice.label
            return self._control.begin_load(hit.lease, targets, first=hit.first + first, request_id=name, choice=choice)
        self._control.release_lease(hit.lease)
        return None


class FailedLoads:
    """Rolls a request whose load failed back to the tokens that it had before. Used by the scheduler's thread.

    vLLM before 0.30 accepts only bad blocks, and only for models with one KV group. In tpu-inference, KVStow reports no
    more than that. If that group has a window, vLLM would continue at the first bad block without the window before it.
    A request that had nothing on the GPU, or has lost its window, cannot continue because it would read wrong bytes. It
    is held back until it is aborted. Loads are bypassed from then on, so that no other request gets stuck.
    """

    def __init__(
        self, control: ControlPlane, groups: KVGroups, null_block: int, requests: Mapping[str, TrackedRequest]
    ) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller."""
        self._control, self._groups, self._null_block, self._requests = control, groups, null_block, requests
        self._stranded: set[str] = set()

    def continuing(self, ended: Collection[str]) -> set[str]:
        """The requests that may continue, out of those whose loads have `ended`. Also contains requests that were held
        back and have been aborted since."""
        failed = {name for name in ended if name in self._requests and self._requests[name].load.has_failed}
        stuck = {name for name in failed if not self._rewind(self._requests[name])}
        if stuck:
            self._strand(stuck)
        aborted = {name for name in self._stranded if name not in self._requests}
        self._stranded -= aborted
        return {*ended} - stuck | aborted

    def _rewind(self, tracked: TrackedRequest) -> bool:
        """Let the request continue after its local prefix. Returns False if it lacks something that the next token
        reads."""
        for group in self._groups.partial:
            first, end = group.first_block(tracked.load.start), tracked.load.start // group.block_tokens
            if self._null_block in tracked.tables[group.index][first:end]:
                return False
        if tracked.load.start:
            tracked.request.num_computed_tokens = tracked.load.start
        return tracked.load.start > 0

    def _strand(self, stuck: set[str]) -> None:
        self._stranded |= stuck
        end = self._control.bypass_loads()
        logger.error(
            "requests %s wait until they are aborted: their loads failed, and this engine cannot compute them if the "
            "model has several KV groups or a window; loads are bypassed until %s",
            ", ".join(sorted(stuck)),
            end,
        )
