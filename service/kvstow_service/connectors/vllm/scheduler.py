"""The scheduler side: turns what vLLM's scheduler does into calls of the engine, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion, Op, StepPlan
from kvstow_service.connectors.vllm.groups import KVGroups
from kvstow_service.connectors.vllm.hits import HitFinder
from kvstow_service.connectors.vllm.lazy import LazyStores
from kvstow_service.connectors.vllm.loads import Loads
from kvstow_service.connectors.vllm.requests import Request, TrackedRequest
from kvstow_service.connectors.vllm.rewinds import Rewinds
from kvstow_service.connectors.vllm.sources import BlockPool, SourceBlocks
from kvstow_service.connectors.vllm.states import StateStores
from kvstow_service.connectors.vllm.stores import EagerStores, Offer, OfferObserver

_NO_STORE = 1 << 63  # later than all


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
    """A request that has ended. Its stores are `last_store` and older ones."""

    last_store: int
    keys: list[bytes]


class SchedulerSide:
    """Follows the requests of one vLLM scheduler. Every method is called on its thread.

    A step costs O(blocks that became complete), whatever the number of requests. The engine's own threads (admin
    server, keeper) work beside it, under the engine's lock.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        groups: KVGroups,
        pool: BlockPool,
        *,
        lazy_blocks: int | None = None,
        observer: StoreObserver | None = None,
    ) -> None:
        """`lazy_blocks`: how many blocks from eviction on the GPU a block is stored; None stores eagerly."""
        self._engine, self._groups, self._pool = engine, groups, pool
        self._requests: dict[str, TrackedRequest] = {}
        self._hits = HitFinder(engine, groups)
        self._loads = Loads(engine, groups, pool.null_block.block_id)
        self.rewinds = Rewinds(engine, groups, pool.null_block.block_id, self._requests)
        self._sources = SourceBlocks(pool)
        self._eager = EagerStores(groups, pool.blocks, observer) if lazy_blocks is None else None
        self._lazy = None if lazy_blocks is None else LazyStores(engine, pool, lazy_blocks)
        self._states = StateStores(pool) if groups.has_states else None
        self._observer = observer
        self._planned_stores: list[Op] = []
        self._boots: tuple[str | None, ...] | None = None  # as they were before the first op of the step was planned
        self._pending_stores: dict[int, None] = {}  # ascending
        self._ended: deque[_Ended] = deque()
        self._step = 0

    # -- admission ------------------------------------------------------------------------------------------

    def find_hit(self, request: Request, local: int) -> int:
        """Tokens after the first `local` that the pool can load. Idempotent; what it finds is held."""
        if request.skip_reading_prefix_cache:
            return 0
        tracked = self._tracked(request)
        tracked.loading = False
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
        if self._eager is not None:
            self._eager.admitted(tracked)

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """The request ends, however: store what is complete, and forget it. Its loads end by themselves."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._hits.release(tracked)
        if self._eager is not None and tracked.has_run:
            self._store(self._eager.take_last(tracked, tables), request.request_id)
            last = next(reversed(self._pending_stores), 0)
            self._ended.append(_Ended(last, tracked.offered_keys(self._groups)))
            self._refresh_ended()

    def _tracked(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._hits.release(tracked)
            tracked = self._requests[request.request_id] = TrackedRequest(request, len(self._groups.groups))
            for by_hash in (self._lazy, self._states):
                if by_hash is not None and request.block_hashes:
                    by_hash.hash_bytes = len(request.block_hashes[0])
        return tracked

    # -- one step -------------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> PlannedStep:
        """What starts with this step: loads of the requests admitted in it, stores of what older steps computed."""
        self.settle()
        if self._eager is not None:
            self._follow_tables(self._eager, step.scheduled_cached_reqs)
            self._store(self._eager.take_due(step.num_scheduled_tokens))
        elif self._lazy is not None:
            self._store(self._lazy.take_endangered(self._sources.num_blocks()))
        if self._states is not None:
            self._follow_states(self._states, step)
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

    def _follow_states(self, states: StateStores, step: Any) -> None:
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
        if grant.op is not None:
            self._sources.hold(grant.op.op_id, grant.op.blocks)
            self._pending_stores[grant.op.op_id] = None
            self._planned_stores.append(grant.op)

    # -- what came of it ------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        """Take what a rank says of its ops."""
        self._engine.complete(rank, boot_id, completions)

    def settle(self) -> None:
        """Act on what has become final: GPU blocks that every rank has read are given back."""
        release = self._sources.release if self._lazy is None else self._sources.release_first
        for settled in self._engine.take_settled():
            if settled.direction == "load":
                self._loads.settle(settled.op_id, failed=settled.mark == "failed")
            else:
                release(settled.op_id)
                if settled.mark != "source_free":
                    self._pending_stores.pop(settled.op_id, None)
        self._refresh_ended()

    def _refresh_ended(self) -> None:
        """A request's steps were stored one after the other, so its beginning would be evicted first: once its last
        store is there, all of it goes as late as that, and its beginning last of all."""
        while self._ended and self._ended[0].last_store < next(iter(self._pending_stores), _NO_STORE):
            self._engine.refresh(self._ended.popleft().keys)

    @property
    def has_pending_stores(self) -> bool:
        """Whether stores are planned or under way, be it for too long: steps are needed to start them and to hear of
        their end."""
        self.settle()
        return self._engine.open_transfers > 0 or bool(self._states)

    @property
    def holds_gpu_blocks(self) -> bool:
        """Whether GPU blocks will come back by themselves."""
        return bool(self._sources or self._states)

    def reset(self) -> bool:
        """Forget every block, for good: what is in flight never becomes visible. False while loads are under way, as
        they would bring old blocks into new requests."""
        self.settle()
        if len(self._loads):
            return False
        for tracked in self._requests.values():
            self._hits.release(tracked)
            tracked.withheld = True
        for by_hash in (self._lazy, self._states):
            if by_hash is not None:
                by_hash.forget()
        self._engine.admin.purge(everything=True).run()
        return True
