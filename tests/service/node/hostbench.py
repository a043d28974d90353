"""A `NodeHost` over real pools and real extents, with links that record. The test decides when each thread runs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import ready_report
from tests.service.node.rawengine import HELLO, POOL, SLOT_BYTES, key_of
from tests.service.node.wholenode import EXTENT, ample_memory

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    EventPage,
    ExtentGrant,
    ExtentSlots,
    Found,
    GrantedExtents,
    Hold,
    LoadBegun,
    Lookup,
    PopulatedExtents,
    ReadEvents,
    RevokedExtents,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Populator
from kvstow.memory.nodememory import NodeMemory
from kvstow.messages import Completion, Mark
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool, PoolSettings
from kvstow_service.node.pools.nodesession import NodeSession, result_of

ROW_SLOTS = EXTENT // SLOT_BYTES
ONE_RANK = replace(HELLO, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1))
ONE_RANK_OTHER = replace(
    ONE_RANK, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1, kv_cache_dtype="fp8")
)


@dataclass
class Pushed:
    """A message on its way. `inodes`: those of the descriptors."""

    rank: int | None
    message: Message
    inodes: tuple[int, ...] = ()


class Engine:
    """A session, with the workers of all ranks."""

    def __init__(self, bench: HostBench, session_id: str, hello: Hello, uid: int) -> None:
        self.bench, self.session_id, self.hello, self.uid = bench, session_id, hello, uid
        self.pushed: list[Pushed] = []
        self.grants: dict[int, dict[int, ExtentGrant]] = {}
        self.populated: dict[int, int] = {}
        self.revoked: dict[int, list[int]] = {}
        self.settled: dict[int, list[str]] = {}
        self.refuses_fds = self.keeps_fds = False
        self.kept: list[int] = []
        """Copies of what it was sent, if `keeps_fds`. The test closes them."""
        self.reports = 0
        self.session, self.answer = bench.host.open_session(session_id, hello, self.peer(), "", self._send)

    def peer(self, pid: int = 0) -> Peer:
        return Peer(pid, self.uid, self.uid, None)

    @property
    def pool(self) -> NodePool:
        pool = self.bench.host.find_pool(self.answer.pool)
        assert pool is not None
        return pool

    @property
    def num_ranks(self) -> int:
        assert self.hello.pool is not None
        return self.hello.pool.num_ranks

    def client(self, rank: int) -> str:
        return f"{self.session_id}/{rank}"

    # -- as the attach server's connections -------------------------------------------------------------------

    def _send(self, _: NodeSession, message: Message, rank: int | None, fds: Sequence[int]) -> None:
        self.push(message, rank=rank, fds=fds)

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        if fds and self.refuses_fds:
            raise OSError(24, "Too many open files")
        if isinstance(message, GrantedExtents):
            assert len(fds) == len(message.extents) <= 250
            assert rank is not None
            for grant in message.extents:
                assert self.client(rank) in self.bench.budget.mappers(grant.extent_id), "sent before it was recorded"
            session = next(one for one in self.pool.attached() if one.label.startswith(f"session {self.session_id} "))
            assert not fds or self.client(rank) in session.processes, "sent before the pool knows the process"
        if self.keeps_fds:
            self.kept += map(os.dup, fds)
        inodes = tuple(os.fstat(fd).st_ino for fd in fds)
        self.bench.posted.append(lambda: self._receive(Pushed(rank, message, inodes)))

    def _receive(self, pushed: Pushed) -> None:
        self.pushed.append(pushed)
        rank, message = pushed.rank, pushed.message
        match message:
            case GrantedExtents():
                assert rank is not None
                for grant in message.extents:
                    self.grants.setdefault(rank, {})[grant.extent_id] = grant
                    self.populated[grant.extent_id] = grant.populated_bytes
            case PopulatedExtents():
                self.populated |= dict(message.extents)
            case RevokedExtents():
                assert rank is not None
                self.revoked.setdefault(rank, []).extend(message.extent_ids)
            case SettledOps():
                for op in message.ops:
                    self.settled.setdefault(op.op_id, []).append(op.mark)

    # -- as the engine ----------------------------------------------------------------------------------------

    def join(self, *ranks: int, **fields: Any) -> None:
        for rank in ranks or range(self.num_ranks):
            hello = Hello(role="worker", engine="e", host="h", pid=1, rank=rank, **fields)
            self.session.join_worker(hello, self.peer(100 + rank))

    def register(self, limit: int | None = None) -> None:
        """All that is populated, on all ranks."""
        for rank, grants in self.grants.items():
            told = []
            for grant in grants.values():
                slots = min(grant.num_slots, self.populated[grant.extent_id] // SLOT_BYTES)
                if limit is not None:
                    slots = max(0, min(slots, limit - grant.first_slot))
                told.append(ExtentSlots(grant.extent_id, slots))
            self.session.registered(rank, told)

    def report(self, rank: int | None = None, boot: str = "b") -> None:
        """`pinned_slots` and `applied` are not believed."""
        for one in range(self.num_ranks) if rank is None else (rank,):
            self.reports += 1
            report = ready_report(
                SLOT_BYTES, 0, rank=one, boot_id=boot, pinned_slots=10**6, sender="s", number=self.reports
            )
            result_of(self.session.take_report_in_steps(report))

    def release_revoked(self, *ranks: int) -> None:
        for rank in ranks or list(self.revoked):
            extents = self.revoked.pop(rank, [])
            for extent in extents:
                del self.grants[rank][extent]
            self.session.released(rank, extents)

    def begin_store(self, *numbers: int) -> StoreBegun:
        return self.session.begin_store(BeginStore([key_of(number) for number in numbers]))

    def complete(self, op_id: int, mark: Mark = "done", ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.num_ranks) if ranks is None else ranks:
            result_of(self.session.complete_in_steps(Completions(rank, "b", (Completion(op_id, mark),))))

    def store(self, *numbers: int) -> StoreBegun:
        begun = self.begin_store(*numbers)
        if begun.op_id:
            self.complete(begun.op_id)
        return begun

    def find(self, *numbers: int, hold: Hold = Hold.NOTHING) -> Found:
        found = self.session.lookup(Lookup([key_of(number) for number in numbers], hold))
        assert isinstance(found, Found)
        return found

    def has(self, *numbers: int) -> int:
        """How many of these blocks it finds."""
        return sum(length for _, length in self.find(*numbers).runs)

    def read_events(self, after: int = 0) -> EventPage:
        return self.session.read_events(ReadEvents(after))

    def begin_load(self, lease_id: int, count: int = 1) -> LoadBegun:
        return self.session.begin_load(BeginLoad(lease_id, 0, count))

    # -- ends -------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        self.session.lose("gone")

    def detach(self) -> None:
        """Its only worker, which is this process, reports that it has nothing mapped any more."""
        self.lose()
        self.session.end_worker(0, Peer(os.getpid(), self.uid, self.uid, os.pidfd_open(os.getpid())))
        self.over()

    def let_go(self, *ranks: int) -> None:
        """Of the workers that got descriptors."""
        for rank in ranks or list(self.grants):
            self.session.end_worker(rank)

    def over(self) -> None:
        self.bench.host.session_over(self.session_id)

    def end(self) -> None:
        self.lose()
        self.let_go()
        self.over()


@dataclass
class HostBench:
    path: Path
    extents: int = 8
    settings: PoolSettings = field(default_factory=PoolSettings)
    starts_populated: bool = True

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.budget = MemoryBudget(self.extents * EXTENT, EXTENT)
        self.memory = MemoryThread(
            NodeMemory(self.budget, Populator(ample_memory(self.path))),
            self.post,
            on_smaller=lambda pool: self.host.follow_pool(pool),
            on_empty=lambda pool: self.host.close_if_unused(pool),
        )
        self.host = NodeHost(self.memory, settings=self.settings, clock=self.clock)
        self.posted: deque[Callable[[], object]] = deque()
        self.engines: list[Engine] = []
        self.run()

    def post(self, action: Callable[[], object]) -> None:
        self.posted.append(action)

    def run_posted(self) -> None:
        """What the attach server's thread would do."""
        while self.posted:
            self.posted.popleft()()

    def run_memory(self) -> None:
        """What the thread of the memory would do."""
        if self.starts_populated:
            for number in range(1, 10_000):
                extent = self.memory.memory.extents.get(number)
                if extent is not None:
                    extent.populated_bytes = extent.num_bytes
        self.memory.run_pending()
        assert not self.memory.faults, "see the log"

    def run(self) -> None:
        """Both threads, until nothing is left to do."""
        for _ in range(20):
            self.run_memory()
            self.run_posted()
        for pool in self.host.pools():
            pool.facade.check_integrity()
        self.budget.check_integrity()

    def attach(self, hello: Hello = HELLO, uid: int = 1000, *, keeps_fds: bool = False, **fields: Any) -> Engine:
        """An engine that has opened its session."""
        self.engines.append(Engine(self, f"{len(self.engines):016x}", replace(hello, **fields), uid))
        self.engines[-1].keeps_fds = keeps_fds
        return self.engines[-1]

    def start(self, hello: Hello = HELLO, uid: int = 1000, **fields: Any) -> Engine:
        """An engine that can store and load."""
        engine = self.attach(hello, uid, **fields)
        engine.join()
        self.run()
        engine.register()
        engine.report()
        return engine

    def close(self) -> None:
        self.memory.close()
        self.memory.close_records()
        self.memory.memory.close()


def grown(bench: HostBench, hello: Any = ONE_RANK, rows: int = 4, **fields: Any) -> Engine:
    """An engine whose pool is full."""
    engine = bench.start(hello, **fields)
    for start in range(0, rows * ROW_SLOTS, 8):
        engine.store(*range(start, start + 8))
        bench.run()
        engine.register()
    assert len(engine.pool.extents) >= rows
    return engine
