"""The scheduler side: translates between vLLM's scheduler and the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

from kvstow.messages import Completion
from kvstow_service.connectors.engine_core.adapters import Adapters
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.gpublocks import BlockPool, GPUBlocks, KnownHashes
from kvstow_service.connectors.engine_core.hints import UnstoredHashes, hints_of
from kvstow_service.connectors.engine_core.kvevents import EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.loads import FailedLoads, Loads
from kvstow_service.connectors.engine_core.offloadmetrics import Observe
from kvstow_service.connectors.engine_core.runningrequests import INTERRUPTED, RunningRequests, ending_of
from kvstow_service.connectors.engine_core.stepplan import PlannedStep, StepDraft
from kvstow_service.connectors.engine_core.stores import (
    EagerStores,
    LazyStores,
    RecurrentStates,
    StoreFinder,
    Stores,
)
from kvstow_service.connectors.engine_core.trackedrequests import Request, TrackedRequest

STEP_BLOCKS = 1024
"""How many blocks one step offers to the pool by default, which takes 1 ms."""


class SchedulerSide:
    """Follows the requests of one vLLM scheduler. Every method is called on its thread.

    A step costs O(blocks that became complete), independent of the number of requests. It offers a bounded number of
    blocks; later steps offer the others. The engine's own threads (admin server, ticker) run at the same time, and the
    engine has a lock.
    """

    def __init__(
        self,
        control: ControlPlane,
        groups: KVGroups,
        pool: BlockPool,
        *,
        lazy_blocks: int | None = None,
        events: EventFeed | None = None,
        observe: Observe = lambda name, value: None,
        step_blocks: int = STEP_BLOCKS,
        drafts: bool = False,
        adapters: Adapters | None = None,
        policy: LoadPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `lazy_blocks`, a block is stored when it is this many blocks away from eviction on the GPU; None stores
        eagerly. `observe` takes the observations of vLLM's own metrics. `step_blocks`: how many blocks a step offers at
        most. `drafts`: see `VLLMProcess`. `adapters`: None if no request has a LoRA adapter."""
        self.control, self.events = control, events
        self._groups, self._adapters = groups, adapters
        self._observe, self._step_blocks = observe, step_blocks
        self._requests: dict[str, TrackedRequest] = {}
        self._gpu = GPUBlocks(pool)
        if adapters is not None:
            self._gpu.known_hashes = KnownHashes(self._requests, 2 * len(pool.blocks))
        if events is not None:
            events.follow_requests(groups, self._requests, 2 * len(pool.blocks))
        self._draft = StepDraft()
        null_block = pool.null_block.block_id
        self.policy = policy
        policy.requests = self._requests
        self._loads = Loads(control, self._draft, groups, null_block, observe, policy, clock, drafts=drafts)
        self.failed_loads = FailedLoads(control, groups, null_block, self._requests)
        self._stores = Stores(control, self._draft, self._gpu, events, to_front=lazy_blocks is not None)
        self._finder: StoreFinder
        if lazy_blocks is None:
            self._finder = EagerStores(groups, self._gpu, self._stores, self._requests, events, step_blocks)
        else:
            self._finder = LazyStores(control, self._gpu, self._stores, events, lazy_blocks, step_blocks)
        self._states = RecurrentStates(self._gpu, self._stores)
        self._running = RunningRequests(control, groups)

    # -- admission ------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        if not request.skip_reading_prefix_cache:
            self._loads.expect(self._tracked(request))

    def find_hit(self, request: Request, local: int) -> int | None:
        """How many tokens after the first `local` the pool can load. None makes vLLM ask again in the next step,
        because that is not known yet or another request is loading them. Idempotent. The blocks that it finds are held.

        A request whose load has failed is computed. vLLM, at least up to 0.32, counts the blocks that such a request
        needs against its own next load, and may never admit it.
        """
        if request.skip_reading_prefix_cache:
            return 0
        tracked = self._tracked(request)
        tracked.load.is_under_way, tracked.load.choice = False, None
        if tracked.adapter is not None and self._adapters is not None:
            tracked.adapter.check()
            if self._adapters.must_wait(tracked.adapter):
                return None
        if tracked.load.has_failed:
            tracked.load.start = local
            return 0
        return self._loads.hold_hit(tracked, local)

    def loads_by_layer(self, request: Request) -> bool:
        """Whether what `find_hit` has just found is loaded within the step that computes with it."""
        choice = self._tracked(request).load.choice
        return choice is not None and choice.by_layer

    def admit(self, request: Request, tables: Sequence[Sequence[int]], load_tokens: int) -> Literal[True]:
        """Plan the load of a request that has its GPU blocks: `load_tokens` of the tokens that `find_hit` found.

        vLLM calls it again, with nothing to load, when a load has ended, and when a streamed request has got more
        input. The request's blocks are then offered to the pool, except those that the load brought. Blocks that the
        pool still has count as used, and blocks that it has lost are stored again.
        """
        tracked = self._tracked(request)
        tracked.give_tables(tables, self._draft.number)
        first = tracked.load.start + load_tokens
        if (
            tracked.load.is_under_way and not load_tokens
        ):  # the load has ended, and vLLM continues after its last good block
            first = request.num_computed_tokens
        tracked.computed_from = min(tracked.computed_from, first)
        if load_tokens:
            if self.events is not None:
                self.events.used(tracked, tracked.load.start, tracked.load.start + load_tokens)
            self._loads.count_hit(tracked, load_tokens)
            tracked.load.tokens = range(tracked.load.start, tracked.load.start + load_tokens)
            by_layer = tracked.load.choice is not None and tracked.load.choice.by_layer
            tracked.load.is_under_way, tracked.withheld = not by_layer, False
            self._loads.plan_load(tracked, load_tokens)
            if by_layer:  # no other call follows
                self._finder.admitted(tracked)
            self._running.admitted(tracked)
            return True
        if (
            not tracked.load.is_under_way and request.num_computed_tokens == 0
        ):  # otherwise it keeps the blocks that it had
            tracked.withheld = False
            if not request.skip_reading_prefix_cache:
                self._loads.count_hit(tracked, 0)
        self._loads.ended(tracked)
        if not tracked.load.is_under_way or tracked.load.has_failed:
            tracked.load.tokens = range(0)
        tracked.load.is_under_way = tracked.load.has_failed = False
        self._finder.admitted(tracked)
        self._running.admitted(tracked)
        return True

    def fetched_tokens(self, request: Request) -> int:
        """How many of the tokens that the request loads in this admission came from the store below the pool."""
        return self._tracked(request).load.fetched_tokens

    @property
    def store(self) -> str:
        """The name of that store, if there is one: see `BlockStore.name`."""
        return self.control.store_below

    def fail_admission(self, request: Request, tables: Sequence[Sequence[int]], load_tokens: int) -> None:
        """Report the load of a request as failed with the next step, because `admit` has raised, and vLLM waits for the
        load anyway."""
        tracked = self._tracked(request)
        tracked.give_tables(tables, self._draft.number)
        tracked.load.hit = None
        self._loads.lose_load(tracked, load_tokens)

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Store the complete blocks of a request that ends, for any reason, and forget the request. Its loads end on
        their own."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._loads.ended(tracked)
        self.policy.finished(request.request_id)
        if self._gpu.known_hashes is not None:
            self._gpu.known_hashes.add_ended(tracked)
        if self._gpu.unstored is not None:
            self._gpu.unstored.end(tracked)
        if tracked.adapter is not None:
            tracked.adapter.check(now=True)
        if tracked.has_run and self._groups.partial:  # first, so that the stores count as the request's
            self._finder.offer_last(tracked, tables)
        is_incomplete = self._running.ended(tracked, ending_of(request))
        if tracked.has_run and (is_incomplete or not self._groups.partial):
            self._finder.offer_last(tracked, tables, again=is_incomplete)

    def _tracked(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._loads.ended(tracked)
                self._running.ended(tracked, INTERRUPTED)
                if self._gpu.unstored is not None:
                    self._gpu.unstored.end(tracked)
            adapter = None if self._adapters is None else self._adapters.of(request)
            tracked = TrackedRequest(request, self._groups.num_tables, adapter, hints_of(request))
            self._requests[request.request_id] = tracked
            if not tracked.may_store and self._gpu.unstored is None:
                groups, first = self._groups.groups, self._groups.groups[0]
                most = 2 * len(self._gpu.pool.blocks) * max(group.hashes_per_block for group in groups)
                self._gpu.unstored = UnstoredHashes(most, first.block_tokens // first.hashes_per_block)
            if self._gpu.unstored is not None:
                self._gpu.unstored.begin(tracked)
            if request.block_hashes:
                self._gpu.hash_bytes = len(request.block_hashes[0])
        return tracked

    # -- one step -------------------------------------------------------------------------------------------

    def plan_step(self, step: Any) -> PlannedStep:
        """Plan what starts with this step: loads of the requests that are admitted in it, and stores of blocks that
        older steps have computed."""
        if self._adapters is not None:
            self._adapters.move_on()
        self._loads.take_begun(wait=True)
        self._loads.drop_unused()
        self.control.step()
        self.settle()
        for request_id in step.preempted_req_ids or ():
            if (tracked := self._requests.get(request_id)) is not None and self._running.ended(tracked, INTERRUPTED):
                self._finder.preempted(tracked)
        if late := self._running.late_blocks():
            self._stores.offer_again(late)
        room = self._stores.next_step()
        self._finder.offer_due(step, self._draft.number, self._states.blocks_computed(step), room)
        self._states.follow_step(step)
        if self._adapters is not None:
            self._adapters.move_on()  # so that lookups before the next step compare files, too
        is_timed = self.policy.planned(self._draft.number + 1, step)
        return self._draft.take()._replace(is_timed=is_timed)

    def take_planned(self) -> PlannedStep:
        """The plan of the step as far as it was made. It is used if `plan_step` has raised."""
        self._loads.take_begun()
        return self._draft.take()

    def step_ended(self, number: int) -> None:
        """Note that rank 0 has computed the step."""
        self.policy.step_ended(number)
        if (news := self.policy.take_news()) is not None:
            self.control.note_prefill(news)

    def measure(self, completions: Iterable[Completion]) -> None:
        """Note how fast loads were that have ended on some rank, which decides the way of the next ones."""
        for one in completions:
            if one.mark == "done" and (by_layer := self._loads.goes_by_layer(one.op_id)) is not None:
                self.policy.measured(one.num_bytes, one.seconds, by_layer=by_layer)

    # -- completion -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Act on results that have become final, and release GPU blocks that every rank has read."""
        for settled in self.control.take_settled():
            if settled.mark == "done":
                self._observe(f"{settled.direction}_size", len(settled.blocks) * self.control.slot_bytes)
            if settled.direction == "load":
                self._loads.load_settled(settled.op_id, failed=settled.mark == "failed")
            else:
                self._stores.store_settled(settled)

    @property
    def has_pending_stores(self) -> bool:
        """Whether steps are needed to start stores, to learn of their end, or to offer blocks again for which the pool
        has room by now. Abandoned stores need no steps."""
        self.settle()
        return (
            self.control.awaited_transfers > 0
            or self._stores.are_awaited
            or self._loads.are_awaited
            or self._states.are_waiting
            or (self._finder.has_backlog and self._stores.retry_room() > 0)
        )

    @property
    def lost_blocks(self) -> int:
        """How many blocks vLLM evicted while they waited to be stored."""
        return self._gpu.lost_blocks

    @property
    def has_requests(self) -> bool:
        """Whether vLLM has requests, so that it goes on making steps."""
        return bool(self._requests)

    @property
    def holds_gpu_blocks(self) -> bool:
        """Whether any referenced GPU blocks will be released without a request's end."""
        return self._gpu.has_sources or self._states.are_waiting

    def release_gpu_blocks(self) -> None:
        """Release all GPU blocks, even if stores still read them. This is only for an engine that has failed: it loads
        nothing any more, so it does not matter if a block is reused while it is stored."""
        self._stores.free_all_sources()
        self._states.forget_states()

    def take_back(self, bad_blocks: Collection[int]) -> None:
        """Take GPU blocks back that were not loaded, although the last step has computed with them. vLLM computes the
        first request that has them again, from the first of them on, which may take several steps. Meanwhile these
        blocks, and all that were computed with them, are in the GPU's prefix cache, and other requests of the step
        count them as computed. So they leave the cache, and each of these requests computes them by itself."""
        bad, blocks = {*bad_blocks}, set[int]()
        for tracked in self._requests.values():
            (table,) = tracked.tables
            first = next((number for number, block in enumerate(table) if block in bad), len(table))
            if first < len(table):
                request, start = tracked.request, first * self._groups.alignment
                request.num_computed_tokens = min(request.num_computed_tokens, start)
                blocks.update(table[first:])
        self._gpu.forget(blocks)

    def reset(self, reason: str = "") -> bool:
        """Forget every block for good, so that stores in flight never become visible. Returns False while loads are
        under way, because they would bring old blocks into new requests.

        `reason`: why this engine has nothing in common with others any more, as a sentence. With a reason, blocks are
        forgotten even while loads are under way, because their requests are computed with old and new weights anyway.
        """
        self.settle()
        if self._loads.are_under_way and not reason:
            return False
        for tracked in self._requests.values():
            self._loads.release_hit(tracked)
            self._running.ended(tracked, INTERRUPTED)
            tracked.withheld = True
        self._finder.forget_blocks()
        self._states.forget_states()
        self._stores.forget_stores()
        self.control.reset(reason)
        return True
