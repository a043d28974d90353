"""vLLM's waiting queue over a `VllmHost`: each step asks about every request that waits, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tests.service.connectors.engine_core.vllmhost import FakeRequest, VllmHost, gpu_hashes, keys_of

from kvstow.messages import Op
from kvstow_service.connectors.engine_core.stepplan import PlannedStep


class WaitingQueue:
    """A request whose load was done in one step continues in the next one, before the others are asked about. One whose
    load failed is asked about again, after the others. Requests run in the step that admits them, to the end of their
    prompts."""

    def __init__(self, host: VllmHost, *requests: FakeRequest) -> None:
        self.host = host
        self.waiting = list(requests)
        self.loading: list[FakeRequest] = []
        self.finished: list[FakeRequest] = []
        self.loads: dict[str, int] = {}
        """How many tokens each request has loaded."""
        self.copied = 0
        """Blocks of all loads that have begun."""
        self._loaded: list[FakeRequest] = []
        self._ops: dict[str, Op] = {}

    def names(self, requests: Iterable[FakeRequest]) -> list[str]:
        return [request.request_id for request in requests]

    def local(self, request: FakeRequest) -> int:
        """How many of its tokens vLLM finds on the GPU. The last one is always computed."""
        groups = self.host.groups
        end = (request.num_tokens - 1) // groups.alignment * groups.alignment
        while end and not all(self._has(request, number, end) for number in range(len(groups.groups))):
            end -= groups.alignment
        return end

    def step(self, *, end_loads: bool = True, fail: Collection[str] = (), held_up: bool = False) -> PlannedStep:
        """One step. Afterwards the loads under way end, those of the requests `fail` with a failure. With `held_up`,
        vLLM has no room to schedule a request whose load is done, so it also asks about no other."""
        scheduled: dict[FakeRequest, int] = {}
        if not held_up:
            self._resume(scheduled)
            self._ask(scheduled)
        plan = self.host.step(scheduled, copy=False)
        self._ops |= dict(zip(plan.load_requests, plan.loads.ops, strict=True))
        self.copied += sum(len(op.blocks) for op in plan.loads.ops)
        self.finished += scheduled
        if end_loads:
            self.end_loads(fail)
        return plan

    def run(self, most: int = 20) -> int:
        """Step until every request has run. Returns the number of steps."""
        for number in range(most):
            if not (self.waiting or self.loading or self._loaded):
                return number
            self.step()
        raise AssertionError(f"{self.names(self.waiting)} wait, {self.names(self.loading)} load")

    def end_loads(self, fail: Collection[str] = ()) -> None:
        for request in [request for request in self.loading if request.request_id in self._ops]:
            op = self._ops.pop(request.request_id)
            for rank in self.host.ranks:
                rank.run(op.op_id, fail=request.request_id in fail)
            self.loading.remove(request)
            if request.request_id in fail:
                self.host.preempt(request)
                self.waiting.append(request)
            else:
                self._loaded.append(request)
        self.host.side.settle()

    def abort(self, request: FakeRequest) -> None:
        """vLLM keeps the blocks of a request that loads until its load has ended, and caches none of them."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.loading.remove(request)
        self.host.side.finish(request, request.block_ids)

    def assert_all_hold(self, requests: Sequence[FakeRequest]) -> None:
        """Each request's blocks hold what belongs there."""
        for request in requests:
            for group in self.host.groups.groups:
                needed = slice(group.first_block(request.num_tokens), request.num_tokens // group.block_tokens)
                assert self.host.contents(request, group)[needed] == keys_of(request.tokens, group)[needed]

    def _resume(self, scheduled: dict[FakeRequest, int]) -> None:
        loaded, self._loaded = self._loaded, []
        for request in loaded:
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            scheduled[request] = request.num_tokens - request.num_computed_tokens
            self.host.resume(request, scheduled[request])

    def _ask(self, scheduled: dict[FakeRequest, int]) -> None:
        for request in list(self.waiting):
            local = self.local(request)
            found = self.host.side.find_hit(request, local)
            if found is None:
                continue
            self.waiting.remove(request)
            if found:
                self.loads[request.request_id] = self.loads.get(request.request_id, 0) + found
                self.host.admit(request, local=local, load=found)
                self.loading.append(request)
            else:
                scheduled[request] = request.num_tokens - local
                self.host.admit(request, scheduled[request], local=local)

    def _has(self, request: FakeRequest, number: int, end: int) -> bool:
        group = self.host.groups.groups[number]
        hashes = gpu_hashes(request.tokens, group)[group.first_block(end) : end // group.block_tokens]
        return all(self.host.pool.cached(block_hash) is not None for block_hash in hashes)
