"""Memory on demand: what a pool gets, and when its engines see it."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence

import pytest
from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ONE_RANK, ROW_SLOTS, Engine, HostBench, grown
from tests.service.node.rawengine import SLOT_BYTES
from tests.service.node.wholenode import EXTENT

from kvstow.attach.calls import ExtentSlots, GrantedExtents, Hold
from kvstow.attach.wire import Message
from kvstow.errors import LeaseError
from kvstow.memory.nodememory import NodeMemory
from kvstow_service.node.pools.noderecords import NodeRecords


def granted(engine: Engine) -> list[GrantedExtents]:
    return [pushed.message for pushed in engine.pushed if isinstance(pushed.message, GrantedExtents)]


def test_a_pool_gets_memory_when_all_ranks_are_there_and_more_as_it_fills(bench: HostBench) -> None:
    engine = bench.attach()
    engine.join(0)
    bench.run()
    assert engine.grants == {}
    engine.join(1)
    bench.run()
    assert [len(engine.grants[rank]) for rank in (0, 1)] == [1, 1]
    engine.register()
    engine.report()
    engine.store(0)
    bench.run()
    assert engine.pool.extents == (ROW_SLOTS, ROW_SLOTS), "one row is always ahead"
    engine.register()
    for start in range(1, ROW_SLOTS, 4):
        engine.store(*range(start, start + 4))
    bench.run()
    assert len(engine.pool.extents) == 3
    grants = sorted(engine.grants[0].values(), key=lambda grant: grant.number)
    assert [(grant.number, grant.first_slot, grant.num_slots) for grant in grants] == [
        (number, number * ROW_SLOTS, ROW_SLOTS) for number in range(3)
    ]


def test_a_pool_gets_no_more_than_its_engines_ask_for(bench: HostBench) -> None:
    engine = bench.start(wanted_bytes=2 * SLOT_BYTES * (ROW_SLOTS + 5))
    for start in range(0, 60, 4):
        engine.store(*range(start, start + 4))
        bench.run()
        engine.register()
    assert engine.pool.extents == (ROW_SLOTS, 5)
    assert bench.memory.figures.spare_bytes > 0
    other = bench.start()
    other.store(*range(100, 108))
    bench.run()
    assert other.pool.extents == (ROW_SLOTS, 5, ROW_SLOTS), "the larger wins"


class Recorder(NodeRecords):
    """Knows what was recorded last."""

    def __init__(self) -> None:
        self.problems, self.notice, self.joins, self._most_bytes = {}, None, 1, 64 * EXTENT
        self._pools, self._workers, self._roster, self._client = {}, {}, None, None
        self.recorded: set[int] = set()
        self.workers: set[str] = set()

    def save(self, memory: NodeMemory) -> None:
        self.recorded = {number for number, extent in memory.budget.extents.items() if not extent.is_spare}
        self.workers = set(self._workers)

    def check(self, memory: NodeMemory) -> None:
        """There is no keeper."""


def test_nothing_is_handed_out_before_it_is_recorded(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = bench.memory.records = Recorder()
    push, sent = Engine.push, list[int]()

    def checked(engine: Engine, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        if isinstance(message, GrantedExtents):
            assert engine.client(rank or 0) in recorder.workers
            assert {grant.extent_id for grant in message.extents} <= recorder.recorded
            sent.extend(grant.extent_id for grant in message.extents)
        push(engine, message, rank=rank, fds=fds)

    monkeypatch.setattr(Engine, "push", checked)
    grown(bench, rows=3)
    assert len(sent) >= 3
    recorder.close(bench.host.pools())


@pytest.mark.parametrize("seal", [0x10, fcntl.F_SEAL_SEAL])
def test_memory_that_an_engine_has_sealed_is_handed_out_no_more(bench: HostBench, seal: int) -> None:
    first = grown(bench, rows=3)
    sealed = next(extent for extent, grant in first.grants[0].items() if grant.number == 1)
    found = bench.memory.memory.extents.get(sealed)
    assert found is not None
    fcntl.fcntl(found.fd, fcntl.F_ADD_SEALS, seal)
    second = bench.attach(ONE_RANK)
    second.join()
    bench.run()
    assert sorted(grant.number for grant in second.grants[0].values()) == [0]
    first.end()
    bench.run()
    assert sealed not in bench.memory.memory.extents
    assert sealed not in second.grants[0]
    second.register()
    second.report()
    assert second.store(1000).op_id


def test_memory_that_is_sealed_before_it_is_populated_is_replaced(make_bench: MakeBench) -> None:
    """All workers have it, and the populator leaves it alone."""
    bench = make_bench(starts_populated=False)
    engine = bench.attach(ONE_RANK)
    engine.join()
    bench.run()
    (sealed,) = engine.grants[0]
    found = bench.memory.memory.extents.get(sealed)
    assert found is not None
    fcntl.fcntl(found.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    bench.run()
    assert engine.revoked == {0: [sealed]}
    engine.release_revoked()
    bench.starts_populated = True
    bench.run()
    engine.register()
    engine.report()
    assert sealed not in engine.grants[0]
    assert engine.store(1).op_id


def test_descriptors_come_in_frames_of_at_most_250(make_bench: MakeBench) -> None:
    bench = make_bench(extents=260)
    engine = bench.start(ONE_RANK)
    bench.budget.pool(engine.pool.name).wanted = None
    bench.memory.do(bench.memory.memory.retry)
    bench.run()
    late = bench.start(ONE_RANK)
    sizes = [(len(sent.extents), sent.is_all) for sent in granted(late)]
    assert sizes == [(250, False), (10, True)]


def test_a_worker_is_told_that_it_has_everything_also_if_that_is_nothing(bench: HostBench) -> None:
    """It lets go of what it has of an earlier service then, whose memory would count twice on the machine."""
    engine = bench.attach()
    engine.join(0)
    bench.run()
    assert granted(engine) == [GrantedExtents(SLOT_BYTES, (), True)]
    engine.join(1)
    bench.run()
    bench.run()
    assert [(len(sent.extents), sent.is_all) for sent in granted(engine)] == [(0, True), (1, True), (1, True)]


def test_devices_numa_nodes_decide_where_memory_is_made(bench: HostBench) -> None:
    engine = bench.attach()
    engine.join(0, numa_node=1)
    engine.join(1)
    bench.run()
    assert [rank.numa_node for rank in bench.budget.pool(engine.pool.name).layout.ranks] == [1, None]


def test_slots_are_shown_as_they_are_populated_and_registered(make_bench: MakeBench) -> None:
    bench = make_bench(starts_populated=False)
    engine = bench.attach()
    engine.join()
    bench.run()
    engine.report()
    assert bench.host.sessions()[0].state == "attaching"
    assert engine.begin_store(1).outcomes == {"dropped_not_ready": 1}
    (row,) = bench.budget.pool(engine.pool.name).rows.values()
    first, second = (bench.memory.memory.extents.get(number) for number in row.extents)
    assert first is not None
    assert second is not None
    first.populated_bytes, second.populated_bytes = 2 * SLOT_BYTES, 3 * SLOT_BYTES
    bench.run()
    assert engine.pool.slots.limit == 2
    first.populated_bytes = 8 * SLOT_BYTES
    bench.run()
    assert engine.populated == {row.extents[0]: 8 * SLOT_BYTES, row.extents[1]: 3 * SLOT_BYTES}
    assert engine.pool.slots.limit == 3
    assert engine.begin_store(1).outcomes == {"dropped_not_ready": 1}
    engine.register()
    assert bench.host.sessions()[0].state == "attached"
    begun = engine.begin_store(*range(5))
    assert sorted(begun.slots) == [0, 1, 2]


def test_a_rank_that_registers_less_than_before_sees_less(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(*range(10))
    lease = engine.find(9, hold=Hold.PRESENT)
    (extent,) = engine.grants[0]
    engine.session.registered(0, [ExtentSlots(extent, 4)])
    assert engine.has(*range(10)) == 4
    with pytest.raises(LeaseError, match="broken"):
        engine.begin_load(lease.lease_id)
