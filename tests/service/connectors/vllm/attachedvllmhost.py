"""A `VllmHost` whose engine is attached to a service that answers late."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, FakeRequest, VllmHost, keys_of
from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.hello import number_of
from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.errors import CopyError
from kvstow.messages import Completion
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.kvevents import EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPath
from kvstow_service.connectors.engine_core.schedulerside import STEP_BLOCKS
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

PROMPT = "abcdefghijklm"  # 12 tokens can be loaded, in 6 blocks of 2


class AttachedVllmHost(VllmHost):
    """The ranks join a session with the step that brings its ticket, once their copies of the session before have
    ended, and refuse ops of other sessions. A load by layer that they refuse ends the engine, as in a worker."""

    def __init__(
        self,
        groups: KVGroups = ONE_GROUP,
        *,
        gpu_blocks: int = 33,
        slots: int = 64,
        delay: int | Callable[[], int] = 1,
        lazy_blocks: int | None = None,
        is_up: bool = True,
        path: LoadPath = "async",
        step_budget: float = 0.01,
        step_blocks: int = STEP_BLOCKS,
        service: SlowService | None = None,
        memory: dict[int, bytes | None] | None = None,
        make_events: Callable[[AttachedVllmHost, AttachedControl], EventFeed] | None = None,
    ) -> None:
        """`service`, `memory`: those of a pool that has other engines, too."""
        self.clock = FakeClock()
        if service is None:
            config = EngineConfig(slot_bytes=64, capacity_slots=slots)
            delay_of = delay if callable(delay) else lambda: delay
            service = SlowService(config, slots, clock=self.clock, delay=delay_of)
            service.is_up = is_up
        self.service = service
        self.memory: dict[int, bytes | None] = {} if memory is None else memory
        self._joined: tuple[int, AttachedSession] | None = None
        self.ranks_hold = True
        """Whether the rank keeps the holds that it is asked for."""
        control = self.service.control()
        self.events = None if make_events is None else make_events(self, control)
        self._make_side(
            control,
            groups,
            gpu_blocks,
            path=path,
            step_budget=step_budget,
            lazy_blocks=lazy_blocks,
            events=self.events,
            step_blocks=step_blocks,
        )
        link: Any = SimpleNamespace(
            pool=self.service.pool, desired=self._desired, report=self._report, complete=self.control.complete
        )
        self.ranks = [FakeRank(link, memory=self.memory)]
        for _ in range(2):  # the first makes the session, the second brings its ticket
            self.step()

    def step(self, scheduled: dict[FakeRequest, int] | None = None, *, copy: bool = True) -> PlannedStep:
        self._ticket = self.control.ticket  # before the step is planned, as `build_connector_meta` does
        plan = super().step(scheduled, copy=copy)
        hold = self.control.holds.next(self.control.ticket, plan.ops, has_requests=self.side.has_requests)
        is_kept = self.ranks_hold and self._joined is not None and self._joined[0] == hold.session
        self.control.holds.note(0, hold.number if is_kept else 0)
        return plan

    def expect(self, request: FakeRequest) -> None:
        self.side.expect(request)

    def ask_now(self, request: FakeRequest, local: int = 0) -> int | None:
        """What vLLM is told: None if it is to ask again in the next step."""
        return self.side.find_hit(request, local)

    def answer(self, request: FakeRequest, local: int = 0) -> int:
        """What vLLM is told after as many steps as it takes."""
        for _ in range(10):
            if (hit := self.ask_now(request, local)) is not None:
                return hit
            self.step()
        raise AssertionError("no answer")

    def has_loaded(self, request: FakeRequest, tokens: int) -> bool:
        """Whether the request's blocks of its first `tokens` hold what belongs there, in every KV group."""
        for group in self.groups.groups:
            blocks = slice(group.first_block(tokens), tokens // group.block_tokens)
            if self.contents(request, group)[blocks] != keys_of(request.tokens, group)[blocks]:
                return False
        return True

    def settle(self) -> None:
        """Steps until nothing is under way."""
        for _ in range(50):
            if not self.side.has_pending_stores:
                return
            self.step()
        raise AssertionError("transfers do not end")

    def stored(self) -> set[bytes]:
        blocks = self.service.facade.blocks(limit=1000).blocks
        keys = [bytes.fromhex(block.key) for block in blocks]
        assert [self.memory.get(block.slot) for block in blocks] == keys
        return set(keys)

    @property
    def has_memory(self) -> bool:
        """Whether the ranks have joined the session that the engine has."""
        ticket = self.control.ticket
        return self._joined is not None and ticket is not None and self._joined[0] == ticket.number

    @property
    def leases(self) -> int:
        return self.service.facade.stats().pool.leases

    def _join(self) -> None:
        """As the worker does: refuse ops of the old session, let its copies end, tell the service, join the new one."""
        ticket = self._ticket
        if ticket is None or (self._joined is not None and self._joined[0] == ticket.number):
            return
        (rank,) = self.ranks
        rank.run_all()
        if self._joined is not None:
            self.service.let_go(self._joined[1], 0)
        assert self.service.session is not None
        self._joined = ticket.number, self.service.session
        rank.pin(self.service.pool.memory_slots())

    def _submit(self, plan: PlannedStep) -> None:
        self._join()
        number = 0 if self._joined is None else self._joined[0]
        if any(number_of(op.op_id) != number for op in plan.layered.ops):
            raise CopyError("the session of this op has ended")
        for rank in self.ranks:
            for op in (*plan.stores.ops, *plan.loads.ops, *plan.layered.ops):
                if number_of(op.op_id) == number:
                    rank.submit(op)
                else:
                    self.control.complete(rank.rank, rank.boot_id, [Completion(op.op_id, "failed", "another session")])

    def _desired(self) -> Any:
        return self.service.pool.target.desired

    def _report(self, report: Any) -> Any:
        assert self._joined is not None
        return self._joined[1].report(report)


def with_prompt(groups: KVGroups = ONE_GROUP, **options: Any) -> AttachedVllmHost:
    """A host whose pool has the blocks of `PROMPT`, and whose GPU has forgotten them."""
    host = AttachedVllmHost(groups, **options)
    first = FakeRequest("first", PROMPT)
    host.run(first)
    host.finish(first)
    host.settle()
    for block in host.pool.blocks:
        block.block_hash = None
    return host
