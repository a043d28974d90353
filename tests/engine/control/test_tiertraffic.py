"""Puts and fetches as ops of the ledger, and the mutants that must be noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.control.conftest import MakeEngine
from tests.engine.control.mutants import first_rank_decides, rank_0_puts_first, short_ranks_do_not_count
from tests.engine.control.tiernode import Objects, TierNode, in_store
from tests.seeds import few_and_many

from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import OffloadEngine, PoolFacade
from kvstow.control.index import Index
from kvstow.control.sharedpool import SharedPool
from kvstow.messages import TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import FakeRank, make_ranks

KEYS = [bytes([0, 0, number]) for number in range(8)]

MakeNode = Callable[..., TierNode]

pytestmark = pytest.mark.usefixtures("no_log_lines")


@pytest.fixture
def objects() -> Objects:
    return {}


@pytest.fixture
def make_node(make_engine: MakeEngine, objects: Objects) -> MakeNode:
    def make(slots: int = 8, ranks: int = 3, *, replicated: bool = False, **settings: Any) -> TierNode:
        engine = make_engine(slots, ranks, **settings)
        return TierNode(engine, make_ranks(engine), objects, replicated=replicated)

    return make


def slots_of(node: TierNode) -> dict[str, int]:
    engine = node.engine
    assert isinstance(engine, OffloadEngine)
    engine.check_integrity()
    counts = engine.stats().pool.slots
    return {name: getattr(counts, name) for name in counts.__slots__ if getattr(counts, name)}


def only(started: list[TierOp]) -> TierOp:
    assert len(started) == 1
    return started[0]


def test_what_one_node_puts_another_one_fetches(make_node: MakeNode) -> None:
    here, there = make_node(), make_node()
    here.store(KEYS[:4])
    here.put(KEYS[:4], most=2)
    here.run_all()
    assert [(one.direction, one.moved) for one in here.tier.take_settled()] == [("put", 2), ("put", 2)]
    there.fetch(KEYS[:4], most=3)
    there.run_all()
    assert [one.moved for one in there.tier.take_settled()] == [3, 1]
    assert there.loaded(KEYS) == 4
    assert slots_of(here) == slots_of(there) == {"free": 4, "cached": 4}


def test_a_fetch_is_visible_when_all_ranks_have_it(make_node: MakeNode, objects: Objects) -> None:
    node = make_node()
    in_store(objects, KEYS[:2], 3)
    op = only(node.fetch(KEYS[:2]))
    node.deliver()
    for rank in (1, 0, 2):
        assert node.engine.lookup(KEYS) == 0
        assert slots_of(node)["filling"] == 2
        assert not node.tier.take_settled()
        node.run(rank, op)
    assert node.loaded(KEYS) == 2


def test_a_short_rank_cuts_the_tail_of_a_fetch(make_node: MakeNode, objects: Objects) -> None:
    node = make_node()
    in_store(objects, KEYS[:5], 3)
    del objects[KEYS[2], 1]
    node.fetch(KEYS[:5])
    node.run_all()
    assert node.loaded(KEYS) == 2
    assert [one.moved for one in node.tier.take_settled()] == [2]
    assert slots_of(node) == {"free": 6, "cached": 2}


def test_the_worst_rank_says_what_the_store_could_not_do(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(ranks=2)
    in_store(objects, KEYS, 2)
    op = only(node.fetch(KEYS[:4]))
    node.deliver()
    for rank, failed in ((1, 3), (0, 0)):
        node.move(rank, op, 4 - failed)
        done = TierCompletion(op.op_id, "done", moved=4 - failed, failed=failed, full=bool(failed))
        node.engine.complete(rank, node.ranks[rank].boot_id, [done])
    (settled,) = node.tier.take_settled()
    assert (settled.moved, settled.failed, settled.full) == (1, 3, True)


def test_blocks_beyond_what_a_session_has_registered_are_not_put(clock: FakeClock) -> None:
    pool = SharedPool(EngineConfig(slot_bytes=64, capacity_slots=8), clock=clock)
    pool.add_extent(8)
    pool.set_populated(8)
    session = AttachedSession(pool, 1, "engine", "model")
    rank = FakeRank(session, 0, {})
    rank.pin(8)
    node = TierNode(session, [rank], {})
    node.store(KEYS)
    session.watermark = 4
    slots = session.namespace.keys.slots_of(KEYS)
    beyond = [key for key, slot in zip(KEYS, slots, strict=True) if slot is not None and slot >= 4]
    assert len(beyond) == 4
    assert node.tier.out_of_reach(KEYS) == beyond
    op = only(node.put(KEYS))
    assert set(op.keys) == set(KEYS) - set(beyond)
    node.run_all()


def test_a_rank_that_fails_makes_a_miss_of_the_fetch(make_node: MakeNode, objects: Objects) -> None:
    node = make_node()
    in_store(objects, KEYS[:2], 3)
    op = only(node.fetch(KEYS[:2]))
    node.deliver()
    node.run(0, op)
    node.run(1, op, fail=True)
    assert slots_of(node)["filling"] == 2, "another rank may still write the slots"
    node.run(2, op)
    assert node.engine.lookup(KEYS) == 0
    assert slots_of(node) == {"free": 8}
    settled = node.tier.take_settled()
    assert [(one.moved, one.error) for one in settled] == [(0, "rank 1: injected")]


def test_a_put_is_no_use(make_node: MakeNode) -> None:
    node = make_node()
    node.store(KEYS[:2])
    node.put(KEYS[:2])
    node.run_all()
    assert [node.engine.pool.index.uses.counts([slot])[0] for slot in (0, 1)] == [0, 0]
    assert slots_of(node) == {"cached": 2, "free": 6}


def test_rank_0_puts_last_and_only_what_all_others_have_put(make_node: MakeNode, objects: Objects) -> None:
    node = make_node()
    node.store(KEYS[:5])
    op = only(node.put(KEYS[:5]))
    assert [[len(one.keys) for one in node.waiting(rank)] for rank in range(3)] == [[], [5], [5]]
    node.run(2, op, most=4)
    assert node.waiting(0) == []
    node.run(1, op, most=2)
    (last,) = node.waiting(0)
    assert (last.op_id, last.keys, last.slots) == (op.op_id, op.keys[:2], op.slots[:2])
    assert slots_of(node) == {"free": 3, "leased": 5}, "the slots are kept until rank 0 has read its own"
    node.run(0, last)
    assert slots_of(node) == {"free": 3, "cached": 5}
    assert [one.moved for one in node.tier.take_settled()] == [2]
    assert {key for key, rank in objects if rank == 0} == set(KEYS[:2])


@pytest.mark.parametrize("moved", [0, 3])
def test_rank_0_puts_nothing_when_another_one_has_failed(make_node: MakeNode, objects: Objects, moved: int) -> None:
    node = make_node()
    node.store(KEYS[:3])
    op = only(node.put(KEYS[:3]))
    node.deliver()
    node.run(1, op, most=moved, fail=bool(moved))
    node.run(2, op)
    assert node.waiting(0) == []
    assert slots_of(node) == {"free": 5, "cached": 3}
    assert not {key for key, rank in objects if rank == 0}


def test_a_put_keeps_its_blocks_from_eviction(make_node: MakeNode) -> None:
    node = make_node(slots=4, ranks=1)
    node.store(KEYS[:4])
    op = only(node.put(KEYS[:4]))
    node.deliver()
    node.store(KEYS[4:6])
    assert node.engine.lookup(KEYS[:4]) == 4
    node.run(0, op)
    node.store(KEYS[4:6])
    assert node.engine.lookup(KEYS[4:]) == 2


def test_blocks_that_are_purged_during_a_put_keep_their_slots(make_node: MakeNode) -> None:
    node = make_node(slots=4, ranks=1)
    node.store(KEYS[:4])
    op = only(node.put(KEYS[:4]))
    node.deliver()
    assert isinstance(node.engine, OffloadEngine)
    node.engine.admin.purge(everything=True).run()
    assert slots_of(node) == {"leased": 4}
    node.run(0, op)
    assert slots_of(node) == {"free": 4}


def test_only_visible_blocks_are_put(make_node: MakeNode) -> None:
    node = make_node(ranks=1)
    node.store([KEYS[0], KEYS[2]])
    assert only(node.put(KEYS[:3])).keys == (KEYS[0], KEYS[2])
    assert node.put(KEYS[5:]) == []


def test_only_what_is_absent_is_fetched(make_node: MakeNode) -> None:
    node = make_node(ranks=1)
    node.store(KEYS[1:2])
    only(node.fetch(KEYS[2:3]))
    assert [node.tier.visible_until(KEYS[:4], at) for at in range(4)] == [
        (0, False),
        (2, True),
        (2, True),
        (3, False),
    ]
    assert node.tier.visible_until(KEYS[:2], 1) == (2, False)
    assert node.tier.absent(KEYS[:4]) == [KEYS[0], KEYS[3]]
    assert node.tier.absent(KEYS[3:4]) == [KEYS[3]]
    assert only(node.fetch(KEYS[:4])).keys == (KEYS[0], KEYS[3])
    assert node.fetch(KEYS[:4]) == []


def test_a_fetch_evicts_and_ends_where_no_slot_is_left(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(slots=4, ranks=2)
    in_store(objects, KEYS[4:], 2)
    node.store(KEYS[:4])
    lease = node.engine.acquire(KEYS[:1])
    assert only(node.fetch(KEYS[4:8])).keys == tuple(KEYS[4:7])
    node.run_all()
    node.engine.release_lease(lease)
    assert node.loaded(KEYS[4:]) == 3


def test_nothing_is_fetched_or_put_during_a_drain(make_node: MakeNode) -> None:
    node = make_node(ranks=1)
    node.store(KEYS[:2])
    assert isinstance(node.engine, OffloadEngine)
    node.engine.admin.drain("all", None)
    assert node.fetch(KEYS[4:]) == node.put(KEYS[:2]) == []
    assert slots_of(node) == {"free": 6, "cached": 2}


def test_replicated_bytes_are_put_once_and_fetched_by_every_rank(make_node: MakeNode, objects: Objects) -> None:
    here, there = make_node(replicated=True), make_node(replicated=True)
    here.store(KEYS[:2])
    here.put(KEYS[:2])
    assert [len(here.waiting(rank)) for rank in range(3)] == [1, 0, 0]
    here.run_all()
    assert set(objects) == {(KEYS[0], 0), (KEYS[1], 0)}
    there.fetch(KEYS[:2])
    there.run_all()
    assert there.loaded(KEYS) == 2


def test_a_key_that_is_purged_during_its_fetch_stays_invisible(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(ranks=1)
    in_store(objects, KEYS[:2], 1)
    node.fetch(KEYS[:2])
    assert isinstance(node.engine, OffloadEngine)
    node.engine.admin.purge(keys=KEYS[:1]).run()
    node.run_all()
    assert node.engine.contains(KEYS[:2]) == [False, True]
    assert slots_of(node) == {"free": 7, "cached": 1}


def test_a_purge_of_what_is_fetched_leaves_a_later_store_of_its_keys_alone(
    make_node: MakeNode, objects: Objects
) -> None:
    node = make_node(ranks=1)
    in_store(objects, KEYS[:3], 1)
    fetch = only(node.fetch(KEYS[:3]))
    node.deliver()
    assert isinstance(node.engine, OffloadEngine)
    node.engine.admin.purge(keys=KEYS[:3]).run()
    (rank,) = node.ranks
    rank.blocks.update({number: node.content(KEYS[number], 0) for number in range(2)})
    op = node.engine.begin_store(KEYS[:2], range(2)).op
    rank.submit(op)
    node.run(0, fetch)
    assert node.engine.lookup(KEYS) == 0
    rank.run_all()
    assert node.loaded(KEYS) == 2
    assert slots_of(node) == {"free": 6, "cached": 2}


def test_repeated_and_late_completions_change_nothing(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(ranks=2)
    in_store(objects, KEYS, 2)
    op = only(node.fetch(KEYS[:2]))
    node.deliver()
    node.run(0, op)
    node.send(0, op)
    assert node.engine.lookup(KEYS) == 0
    node.run(1, op)
    node.send(1, op)
    assert node.loaded(KEYS) == 2
    assert isinstance(node.engine, OffloadEngine)
    faults = node.engine.stats().faults
    assert (faults.duplicate_completions, faults.stale_completions) == (1, 1)


@pytest.mark.parametrize("restarting", [0, 1])
def test_a_rank_that_restarts_ends_its_transfers(make_node: MakeNode, objects: Objects, restarting: int) -> None:
    node = make_node(ranks=2)
    in_store(objects, KEYS, 2)
    node.store(KEYS[:2])
    put = only(node.put(KEYS[:2]))
    fetch = only(node.fetch(KEYS[2:4]))
    node.deliver()
    node.ranks[restarting].restart(8)
    node.queues[restarting].clear()
    other = 1 - restarting
    assert slots_of(node)["filling"] == 2, "the other rank may still write them"
    node.run(other, fetch)
    if other:
        node.run(other, put)
    assert node.waiting(0) == []
    assert slots_of(node) == {"free": 8}
    assert [one.moved for one in node.tier.take_settled()] == [0, 0]


def test_a_rank_that_has_restarted_gets_no_op_of_its_former_boot(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(ranks=2)
    node.store(KEYS[:2])
    node.put(KEYS[:2])
    node.ranks[1].restart(8)
    assert [node.waiting(rank) for rank in (0, 1)] == [[], []]
    assert slots_of(node) == {"free": 8}
    assert not objects


def test_a_store_that_hangs_stops_no_load_or_store(make_node: MakeNode, clock: FakeClock, objects: Objects) -> None:
    node = make_node(slots=8, ranks=1)
    in_store(objects, KEYS, 1)
    node.store(KEYS[:2])
    put, fetch = only(node.put(KEYS[:2])), only(node.fetch(KEYS[2:4]))
    node.deliver()
    clock.advance(31.0)
    engine = node.engine
    assert isinstance(engine, OffloadEngine)
    engine.tick()
    node.ranks[0].report()
    assert engine.readiness().state == "ready"
    assert slots_of(node) == {"free": 4, "leased": 2, "quarantined": 2}
    assert [(one.direction, one.moved) for one in node.tier.take_settled()] == [("fetch", 0)]
    states = {one.direction: one.state for one in engine.transfers()}
    assert states == {"put": "stuck", "fetch": "quarantined"}
    node.store(KEYS[4:6])
    assert node.loaded(KEYS[4:]) == 2
    node.run(0, put)
    node.run(0, fetch)
    assert [one.direction for one in node.tier.take_settled()] == ["put"], "the fetch has ended for the host"
    assert engine.lookup(KEYS[2:]) == 0, "an abandoned fetch stays invisible"
    assert slots_of(node) == {"free": 4, "cached": 4}


def test_a_load_that_is_stuck_behind_a_put_is_the_one_that_is_shown(make_node: MakeNode, clock: FakeClock) -> None:
    node = make_node(ranks=1)
    node.store(KEYS[:2])
    node.put(KEYS[:2])
    engine = node.engine
    assert isinstance(engine, OffloadEngine)
    clock.advance(20.0)
    assert engine.stats().transfers.pending.oldest_seconds == 0.0, "no load or store is pending"
    engine.begin_load(engine.acquire(KEYS[:1]), [1])
    clock.advance(31.0)
    engine.tick()
    node.ranks[0].report()
    pending = engine.stats().transfers.pending
    assert (pending.stuck, pending.oldest_seconds) == (1, 31.0)
    assert "the host has not submitted it" in engine.readiness().reason


def test_tier_transfers_count_as_neither_loads_nor_stores(make_node: MakeNode, objects: Objects) -> None:
    node = make_node(ranks=1)
    in_store(objects, KEYS[4:], 1)
    node.store(KEYS[:2])
    engine = node.engine
    assert isinstance(engine, OffloadEngine)
    before = engine.stats()
    node.put(KEYS[:2])
    node.fetch(KEYS[4:6])
    node.run_all()
    after = engine.stats()
    assert (after.stores, after.transfers.load, after.transfers.store) == (
        *(before.stores, before.transfers.load, before.transfers.store),
    )
    assert [(one.direction, one.moved) for one in node.tier.take_settled()] == [("put", 2), ("fetch", 2)]


def test_what_a_session_fetches_when_it_ends_waits_for_its_processes(clock: FakeClock) -> None:
    pool = SharedPool(EngineConfig(slot_bytes=64, capacity_slots=8), clock=clock)
    pool.add_extent(8)
    pool.set_populated(8)
    session = AttachedSession(pool, 1, "engine", "model")
    session.map_memory("worker")
    rank = FakeRank(session, 0, {})
    rank.pin(8)
    node = TierNode(session, [rank], {})
    only(node.fetch(KEYS[:2]))
    session.lose("test")
    PoolFacade(pool).check_integrity()
    assert len(pool.index.quarantined) == 2
    assert node.tier.take_plans() == []
    with pool.lock:
        session.forget_process("worker")
    PoolFacade(pool).check_integrity()
    assert pool.slots.free == 8


# -- random schedules, whose bytes tell ----------------------------------------------------------------------------


ACTIONS = ["store", "repeat", "rare", *["load", "put", "fetch"] * 2, *["copy"] * 5]


class Fleet:
    """Two nodes and their store; whatever is loaded is verified."""

    def __init__(self, choose: random.Random, objects: Objects) -> None:
        self.choose, self.objects = choose, objects
        self.clock = FakeClock()
        self.num_ranks = choose.randint(1, 3)
        self.nodes = [self.make_node() for _ in range(2)]
        self.checks_books = True

    def make_node(self) -> TierNode:
        config = EngineConfig(slot_bytes=1, capacity_slots=6, num_ranks=self.num_ranks)
        engine = OffloadEngine(config, clock=self.clock)
        node = TierNode(engine, make_ranks(engine), self.objects)
        node.forgets = True
        return node

    def act(self) -> None:
        choose = self.choose
        node = choose.choice(self.nodes)
        first = choose.choice([0, 4])
        keys = KEYS[first : first + choose.randint(1, 4)]
        what = choose.choice(ACTIONS)
        if what == "store":
            node.store(keys)
        elif what == "load":
            node.loaded(keys)
        elif what == "put":
            node.put(keys, most=choose.randint(1, 4))
        elif what == "fetch":
            node.fetch(keys, most=choose.randint(1, 4))
        elif what == "rare":
            self.rare(node, keys)
        else:
            self.copy(node, repeat=what == "repeat")
        if self.checks_books:
            for one in self.nodes:
                assert isinstance(one.engine, OffloadEngine)
                one.engine.check_integrity()

    def rare(self, node: TierNode, keys: list[bytes]) -> None:
        engine = node.engine
        assert isinstance(engine, OffloadEngine)
        what = self.choose.choice(["restart", "purge", "late", "forget"])
        if what == "restart":
            rank = self.choose.choice(node.ranks)
            rank.restart(6)
            node.queues[rank.rank].clear()
        elif what == "purge":
            engine.admin.purge(keys=keys).run()
        elif what == "late":
            self.clock.advance(40.0)
            engine.tick()
        else:  # as a store does, that evicts
            for key in keys:
                self.objects.pop((key, self.choose.randrange(self.num_ranks)), None)

    def copy(self, node: TierNode, *, repeat: bool) -> None:
        node.deliver()
        waiting = [(rank, op) for rank, queue in node.queues.items() for op in queue.values()]
        if not waiting:
            return
        rank, op = self.choose.choice(waiting)
        most = self.choose.choice([None, None, 0, 1])
        node.run(rank, op, most=most, fail=self.choose.random() < 0.1)
        if repeat:
            node.send(rank, op)

    def finish(self) -> None:
        for node in self.nodes:
            node.run_all()
            assert not len(node.engine.ops)
            counts = slots_of(node)
            assert counts.keys() <= {"free", "cached"}, counts


def run_schedules(seeds: range, *, checks_books: bool = True) -> None:
    for seed in seeds:
        fleet = Fleet(random.Random(seed), {})
        fleet.checks_books = checks_books
        for _ in range(80):
            fleet.act()
        fleet.finish()


@pytest.mark.parametrize("seeds", few_and_many(210, 300))
def test_with_all_safeguards_nothing_goes_wrong(seeds: range) -> None:
    run_schedules(seeds)


def puts_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "hold", lambda self, slots: None)
    patch.setattr(Index, "unhold", lambda self, slots: [])


@pytest.mark.parametrize("mutate", [first_rank_decides, short_ranks_do_not_count, puts_hold_nothing])
def test_taking_out_a_safeguard_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_schedules(range(300), checks_books=False)


def test_a_put_of_rank_0_before_the_others_is_noticed(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0_puts_first(monkeypatch)
    node = make_node()
    node.store(KEYS[:3])
    node.put(KEYS[:3])
    with pytest.raises(AssertionError, match="before the others"):
        node.run_all()
