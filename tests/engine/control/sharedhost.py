"""A shared pool with its memory, and engines that attach to it; their copies run when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from tests.doubles.fakes import FakeClock
from tests.doubles.rank import Content, FakeRank, write_blocks

from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.sharedpool import SharedPool
from kvstow.messages import Op


class Client:
    """An engine with one process per rank; its ranks register `registered` slots (by default all)."""

    def __init__(
        self,
        pool: SharedPool,
        memory: list[dict[int, Content]],
        registered: int | None = None,
        namespace: str = "model",
    ) -> None:
        self.session: AttachedSession = pool.attach("engine", namespace)
        self.processes = [(self.session.session_id, rank) for rank in range(pool.config.num_ranks)]
        for process in self.processes:
            self.session.map_memory(process)
        self.ranks = [FakeRank(self.session, rank, slots) for rank, slots in enumerate(memory)]
        for rank in self.ranks:
            rank.pin(pool.capacity if registered is None else registered)

    def begin_store(self, keys: Sequence[bytes]) -> Op | None:
        blocks = range(len(keys))
        write_blocks(self.ranks, blocks, keys)
        op = self.session.begin_store(keys, blocks).op
        for rank in self.ranks:
            rank.submit(op)
        return op

    def run(self) -> None:
        for rank in self.ranks:
            rank.run_all()

    def store(self, keys: Sequence[bytes]) -> None:
        self.begin_store(keys)
        self.run()
        self.session.take_settled()

    def load(self, keys: Sequence[bytes]) -> list[Content]:
        lease = self.session.acquire(keys)
        blocks = range(500, 500 + len(lease.slots))
        op = self.session.begin_load(lease, blocks)
        for rank in self.ranks:
            rank.submit(op)
        self.run()
        return [self.ranks[0].blocks.get(block) for block in blocks]


class Host:
    """A shared pool with its memory."""

    def __init__(
        self,
        slots: int = 8,
        ranks: int = 1,
        *,
        replicated: bool = False,
        policy: str = "lru",
        journal: IndexJournal | None = None,
    ) -> None:
        self.clock = FakeClock()
        config = EngineConfig(
            slot_bytes=64, capacity_slots=slots, num_ranks=ranks, policy=policy, replicated=replicated
        )
        self.pool = SharedPool(config, clock=self.clock, journal=journal)
        self.memory: list[dict[int, Content]] = [{} for _ in range(ranks)]
        if replicated:
            self.memory = [self.memory[0]] * ranks
        self.pool.add_extent(slots)
        self.pool.set_populated(slots)

    def attach(self, registered: int | None = None, namespace: str = "model") -> Client:
        return Client(self.pool, self.memory, registered, namespace)

    def kill(self, client: Client) -> None:
        for process in client.processes:
            self.pool.process_died(process)

    @property
    def counts(self) -> dict[str, int]:
        PoolFacade(self.pool).check_integrity()
        slots = PoolFacade(self.pool).stats().pool.slots
        return {name: getattr(slots, name) for name in ("free", "filling", "cached", "leased", "quarantined")}
