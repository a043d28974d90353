"""The scheduler side: turns what vLLM's scheduler does into calls of the engine, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion, Op, StepPlan
from kvstow_service.connectors.vllm.backlog import RetryPause
from kvstow_service.connectors.vllm.eagerstores import EagerStores
from kvstow_service.connectors.vllm.failedloads import Rewinds
from kvstow_service.connectors.vllm.gpublocks import BlockPool, SourceBlocks
from kvstow_service.connectors.vllm.hits import HitFinder
from kvstow_service.connectors.vllm.kvgroups import KVGroups
from kvstow_service.connectors.vllm.lazystores import LazyStores
from kvstow_service.connectors.vllm.loads import Loads
from kvstow_service.connectors.vllm.offers import Offer, OfferObserver
from kvstow_service.connectors.vllm.offloadmetrics import Observe
from kvstow_service.connectors.vllm.recurrentstates import RecurrentStates
from kvstow_service.connectors.vllm.trackedrequests import Request, TrackedRequest
from kvstow_service.connectors.vllm.written import WrittenBlocks

STEP_BLOCKS = 1024
"""Blocks that one step offers to the pool by default, and brings up to date in its order: 1 ms."""
_NO_STORE = 1 << 63  # later than all
_MOST_LEAVING = 64  # requests that wait for the backlog


class Step(Protocol):
    """What is read of vLLM's `SchedulerOutput`; of its `kv_connector_block_state` (vLLM 0.30), states."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def scheduled_cached_reqs(self) -> Any: ...


class StoreObserver(OfferObserver, Protocol):
    """Hears as well of which blocks are being stored, of those offered since it was told last."""

    def granted(self, keys: Sequence[bytes]) -> None: ...


class PlannedStep(NamedTuple):
    """What the ranks do with one step of vLLM, besides computing. `boots[rank]`: the boot that it is for.
    `load_requests[i]`: the request of `loads.ops[i]`. `lost_loads`: see `PlannedLoads`."""

    number: int
    boots: tuple[str | None, ...]
    stores: StepPlan
    loads: StepPlan
    load_requests: tuple[str, ...]
    lost_loads: dict[str, tuple[int, ...]]


class _Ended(NamedTuple):
    """A request that has ended. Its stores are `last_store` and older ones. Its blocks of the tokens from
    `offered_tokens` on are in order."""

    last_store: int
    tracked: TrackedRequest
    offered_tokens: int


class SchedulerSide:
    """Follows the requests of one vLLM scheduler. Every method is called on its thread.

    A step costs O(blocks that became complete), whatever the number of requests, and offers a bounded number of them;
    the others have their turn in later steps. The engine's own threads (admin server, ticker) work beside it, under
    the engine's lock.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        groups: KVGroups,
        pool: BlockPool,
        *,
        lazy_blocks: int | None = None,
        observer: StoreObserver | None = None,
        observe: Observe | None = None,
        step_blocks: int = STEP_BLOCKS,
    ) -> None:
        """`lazy_blocks`: how many blocks from eviction on the GPU a block is stored; None stores eagerly.
        `observe` takes the observations of vLLM's own metrics. `step_blocks`: how many a step offers at most."""
        self._engine, self._groups, self._pool = engine, groups, pool
        self._requests: dict[str, TrackedRequest] = {}
        self._hits = HitFinder(engine, groups, observe)
        self._loads = Loads(engine, groups, pool.null_block.block_id)
        self.rewinds = Rewinds(engine, groups, pool.null_block.block_id, self._requests)
        self._sources = SourceBlocks(pool)
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.groups)
        self._finder: EagerStores | LazyStores
        if lazy_blocks is None:
            self._finder = EagerStores(groups, pool.blocks, observer, step_blocks)
        else:
            self._finder = LazyStores(engine, pool, lazy_blocks, step_blocks)
        self._states = RecurrentStates(pool) if groups.has_states else None
        self._observer, self._observe, self._step_blocks = observer, observe, step_blocks
        self._pause = RetryPause()
        self._planned_stores: list[Op] = []
        self._boots: tuple[str | None, ...] | None = None  # as they were before the first op of the step was planned
        self._pending_stores: dict[int, None] = {}  # ascending
        self._last_before_reset = 0  # stores up to it are of a model that is no more
        self._leaving: list[TrackedRequest] = []  # have ended; the backlog may have blocks of theirs
        self._ended: deque[_Ended] = deque()
        self._step = 0

    # -- admission ------------------------------------------------------------------------------------------

    def find_hit(self, request: Request, local: int) -> int:
        """Tokens after the first `local` that the pool can load. Idempotent; what it finds is held.

        A request whose load has failed is computed. Up to 0.32 at least, vLLM counts the blocks that such a request
        needs against its own next load, and may never admit it.
        """
        if request.skip_reading_prefix_cache:
            return 0
        tracked = self._tracked(request)
        tracked.loading = False
        if tracked.load_failed:
            tracked.start = local
            return 0
        return self._hits.find(tracked, local)

    def admit(self, request: Request, tables: Sequence[Sequence[int]], load_tokens: int) -> None:
        """The request has its GPU blocks; `load_tokens` of what `find_hit` found shall be loaded into them.

        Called again, with none to load, when a load has ended. Its blocks are offered to the pool then, all but those
        that came from there: those that the pool has count as used, and those that it has lost come back.
        """
        tracked = self._tracked(request)
        tracked.admit(tables, self._step)
        if load_tokens:
            self._note_boots()
            self._hits.count(tracked, load_tokens)
            tracked.loaded = range(tracked.start, tracked.start + load_tokens)
            tracked.loading, tracked.withheld = True, False
            self._loads.plan(tracked, load_tokens)
            return
        self._hits.release(tracked)
        if not tracked.loading:
            tracked.withheld = False
            if not request.skip_reading_prefix_cache:
                self._hits.count(tracked, 0)
        if not tracked.loading or tracked.load_failed:
            tracked.loaded = range(0)
        tracked.loading = tracked.load_failed = False
        if isinstance(self._finder, EagerStores):
            self._finder.admitted(tracked)

    def lose(self, request: Request, tables: Sequence[Sequence[int]], load_tokens: int) -> None:
        """`admit` has raised. vLLM waits for the load all the same, so the next step tells it that the load failed."""
        tracked = self._tracked(request)
        tracked.admit(tables, self._step)
        tracked.hit = None
        self._loads.lose(tracked, load_tokens)

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """The request ends, however: store what is complete, and forget it. Its loads end by themselves."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._hits.release(tracked)
        if isinstance(self._finder, EagerStores) and tracked.has_run:
            self._store(self._finder.take_last(tracked, tables), request.request_id)
            self._leaving.append(tracked)

    def _tracked(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._hits.release(tracked)
            tracked = self._requests[request.request_id] = TrackedRequest(request, self._groups.num_tables)
            for by_hash in (self._finder, self._states):
                if by_hash is not None and request.block_hashes:
                    by_hash.hash_bytes = len(request.block_hashes[0])
        return tracked

    # -- one step -------------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> PlannedStep:
        """What starts with this step: loads of the requests admitted in it, stores of what older steps computed."""
        self.settle()
        self._pause.step()
        room = self._retry_room()
        if isinstance(self._finder, EagerStores):
            self._follow_tables(self._finder, step.scheduled_cached_reqs)
            written = WrittenBlocks(
                step.num_scheduled_tokens, self._requests, self._groups.in_tables, self._states_computed(step)
            )
            offer = self._finder.take_due(step.num_scheduled_tokens, written, room)
        else:
            offer = self._finder.take_endangered(self._sources.num_blocks(), room)
        self._store(offer)
        if self._states is not None:
            self._follow_states(self._states, step)
        self._refresh_ended(room, max(self._step_blocks - len(offer.keys), self._step_blocks // 8))
        return self.take_planned()

    def take_planned(self) -> PlannedStep:
        """The step with what was planned for it so far."""
        loads = self._loads.take_planned()
        stores, self._planned_stores = tuple(self._planned_stores), []
        boots, self._boots = self._boots or (), None
        self._step += 1
        return PlannedStep(self._step, boots, StepPlan(stores), StepPlan(loads.ops), loads.requests, loads.lost)

    def _note_boots(self) -> None:
        """Before an op is planned: a rank that starts anew after this moment refuses the op."""
        if self._boots is None:
            self._boots = self._engine.boot_ids()

    def _follow_tables(self, eager: EagerStores, running: Any) -> None:
        for request_id, new_blocks in zip(running.req_ids, running.new_block_ids, strict=True):
            if new_blocks is None:
                continue
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.admitted_at != self._step:  # at admission the whole table was given
                eager.grown(tracked, new_blocks)

    def _states_computed(self, step: Any) -> list[int]:
        if self._states is None or step.kv_connector_block_state is None:
            return []
        handed_over = step.kv_connector_block_state.boundary_state_offloads
        return [block_id for states in handed_over.values() for _, block_id, _ in states]

    def _follow_states(self, states: RecurrentStates, step: Any) -> None:
        states.take_computed(self._store)
        if step.kv_connector_block_state is not None:
            gone = {*(step.preempted_req_ids or ()), *step.finished_req_ids}
            states.hand_over(step.kv_connector_block_state.boundary_state_offloads, gone)

    def _store(self, offer: Offer, request_id: str = "") -> None:
        if not offer.keys:
            return
        self._note_boots()
        grant = self._engine.begin_store(offer.keys, offer.blocks, request_id=request_id)
        if self._observer is not None:
            self._observer.granted([offer.keys[index] for index in grant.accepted])
        if grant.unplaced:
            self._finder.offer_again([offer.blocks[index] for index in grant.unplaced])
        if grant.op is not None:
            self._sources.hold(grant.op.op_id, grant.op.blocks)
            self._pending_stores[grant.op.op_id] = None
            self._planned_stores.append(grant.op)

    def _retry_room(self) -> int:
        """For how many of the blocks that were offered and not stored there is a slot now."""
        return 0 if self._pause else self._engine.store_room()

    # -- what came of it ------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        """Take what a rank says of its ops."""
        self._engine.complete(rank, boot_id, completions)

    def settle(self) -> None:
        """Act on what has become final: GPU blocks that every rank has read are given back."""
        is_lazy = isinstance(self._finder, LazyStores)
        release = self._sources.release_first if is_lazy else self._sources.release
        for settled in self._engine.take_settled():
            if settled.mark == "done" and self._observe is not None:
                self._observe(f"{settled.direction}_size", len(settled.blocks) * self._engine.config.slot_bytes)
            if settled.direction == "load":
                self._loads.settle(settled.op_id, failed=settled.mark == "failed")
                continue
            release(settled.op_id)
            if settled.mark == "source_free":
                continue
            self._pending_stores.pop(settled.op_id, None)
            if settled.mark == "done":
                self._pause.succeeded()
            elif settled.op_id > self._last_before_reset:
                self._pause.failed()
                self._finder.offer_again(settled.blocks)

    def _refresh_ended(self, room: int, left: int) -> None:
        """A request's steps were stored one after the other, so its beginning would be evicted first: once its last
        store is there, all of it goes as late as that, and its beginning last of all. From its end on, so that this
        may take several steps: `left` are the blocks that this one may look at."""
        if not (self._finder.has_backlog and room) or len(self._leaving) > _MOST_LEAVING:
            last = next(reversed(self._pending_stores), 0)
            self._ended += [_Ended(last, tracked, tracked.offered_tokens) for tracked in self._leaving]
            self._leaving = []
        oldest, alignment = next(iter(self._pending_stores), _NO_STORE), self._groups.alignment
        while left > 0 and self._ended and self._ended[0].last_store < oldest:
            last_store, tracked, end = self._ended.popleft()
            start = max(0, end - max(1, left // self._blocks_per_stride) * alignment)
            keys = tracked.keys_between(self._groups, start, end)
            self._engine.refresh(keys)
            left -= len(keys)
            if start:
                self._ended.appendleft(_Ended(last_store, tracked, start))

    @property
    def has_pending_stores(self) -> bool:
        """Whether steps are needed: to start stores, to hear of their end, or to offer blocks again for which the
        pool has room by now. Stores that were given up need none."""
        self.settle()
        return (
            self._engine.awaited_transfers > 0
            or bool(self._states)
            or (self._finder.has_backlog and self._retry_room() > 0)
        )

    @property
    def holds_gpu_blocks(self) -> bool:
        """Whether GPU blocks will come back by themselves."""
        return bool(self._sources or self._states)

    def release_sources(self) -> None:
        """Give all GPU blocks back, whatever stores still read them. Only for an engine that has failed: it serves
        nothing of what is stored, so nobody sees the bytes of a block that was reused meanwhile."""
        for op_id in tuple(self._pending_stores):
            self._sources.release(op_id)
        if self._states is not None:
            self._states.forget()

    def reset(self) -> bool:
        """Forget every block, for good: what is in flight never becomes visible. False while loads are under way, as
        they would bring old blocks into new requests."""
        self.settle()
        if len(self._loads):
            return False
        for tracked in self._requests.values():
            self._hits.release(tracked)
            tracked.withheld = True
        for part in (self._finder, self._states):
            if part is not None:
                part.forget()
        self._last_before_reset = next(reversed(self._pending_stores), self._last_before_reset)
        self._leaving = []
        self._ended.clear()
        self._engine.admin.purge(everything=True).run()
        return True
