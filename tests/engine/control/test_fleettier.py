"""What a session looks up, fetches and puts, and what its requests wait for, on a fake clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.conftest import Eventually
from tests.engine.control.conftest import MakeEngine
from tests.engine.control.tiernode import TierNode, in_store

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings, TierWait
from kvstow.control.tiertraffic import TierTraffic
from kvstow.errors import ConfigError, TierUnavailableError
from kvstow.messages import TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks
from kvstow.testing.tier import ControlledStore
from kvstow.tier.fingerprint import WEIGHTS_CHANGED
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import StoreCapacity
from kvstow.tier.writepolicy import WriteMode

KEYS = [bytes([0, 0, number]) for number in range(12)]
BLOCK_TOKENS = 10
RANKS = 2


class TieredNode(TierNode):
    """A node whose requests wait for the tier. The store answers look-ups with what ranks have put."""

    def __init__(
        self,
        engine: OffloadEngine,
        clock: FakeClock,
        settings: TierSettings,
        eventually: Eventually,
        store: ControlledStore | None = None,
    ) -> None:
        super().__init__(engine, make_ranks(engine), {})
        self.offload, self.clock, self.eventually = engine, clock, eventually
        self.store_of_names = store or ControlledStore()
        self.fleet = FleetTier(engine, self.store_of_names.open_lookups(), settings, "f", name="fake", clock=clock)
        self.tier = self.fleet.traffic

    def deliver(self) -> None:
        for rank, op in self.fleet.take_plans():
            self.queues[rank][op.op_id] = op

    def add(self, keys: list[bytes], fingerprint: str = "f") -> None:
        """Another node has put these."""
        in_store(self.objects, keys, RANKS)
        for key in keys:
            self.store_of_names.put(str(ObjectName(fingerprint, key, 0, RANKS)), b"x")

    def hear(self) -> None:
        """Step until the store has answered all questions."""
        self.fleet.step()

        def has_heard() -> bool:
            self.fleet.step()
            return not self.fleet._asked

        self.eventually(has_heard)

    def ops(self, direction: str) -> list[TierOp]:
        """Under way on rank 1."""
        return [op for op in self.waiting(1) if op.direction == direction]

    def look(self, keys: list[bytes]) -> TierWait:
        """A request that waits, and knows what the store has."""
        wait = self.fleet.look_for(keys)
        assert wait is not None
        self.hear()
        return wait

    def fetch_all(self, keys: list[bytes]) -> bool:
        """A request comes, and everything goes well. Whether it had to wait for fetches."""
        wait = self.fleet.look_for(keys)
        if wait is None:
            return False
        self.hear()
        if self.fleet.is_over(wait):
            return False
        self.run_all()
        self.fleet.step()
        assert self.fleet.is_over(wait)
        return True

    def outage(self, op: TierOp, rank: int = 1) -> None:
        del self.queues[rank][op.op_id]
        lost = TierCompletion(op.op_id, "failed", "no answer in 0.5 s", outage=True)
        self.engine.complete(rank, self.ranks[rank].boot_id, [lost])


MakeNode = Callable[..., TieredNode]


@pytest.fixture
def make_node(make_engine: MakeEngine, clock: FakeClock, eventually: Eventually) -> Iterator[MakeNode]:
    nodes: list[TieredNode] = []

    def make(slots: int = 12, **settings: Any) -> TieredNode:
        engine = make_engine(slots, RANKS, block_tokens=BLOCK_TOKENS)
        nodes.append(TieredNode(engine, clock, TierSettings(**settings), eventually))
        return nodes[-1]

    yield make
    for node in nodes:
        node.store_of_names.lookups.open()
        node.fleet.close()


@pytest.fixture
def node(make_node: MakeNode) -> TieredNode:
    return make_node()


@pytest.fixture(autouse=True)
def no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvstow.tier")


def test_a_request_waits_until_what_the_store_has_is_in_the_pool(node: TieredNode) -> None:
    node.store(KEYS[:2])
    node.add(KEYS[2:5])
    wait = node.look(KEYS[:8])
    assert not node.fleet.is_over(wait)
    (op,) = node.ops("fetch")
    assert op.keys == tuple(KEYS[2:5])
    node.run(0, op)
    node.fleet.step()
    assert not node.fleet.is_over(wait)
    node.run(1, op)
    node.fleet.step()
    assert node.fleet.is_over(wait)
    assert node.loaded(KEYS[:8]) == 5
    assert node.fleet.status().counters.fetched_blocks == 3


def test_blocks_that_the_pool_has_are_not_asked_for(node: TieredNode) -> None:
    node.store(KEYS[:4])
    node.look(KEYS[:6])
    assert node.store_of_names.batches == [("exists", 2)]
    assert node.fleet.look_for(KEYS[:4]) is None


def test_a_gap_in_the_store_ends_the_fetch(node: TieredNode) -> None:
    node.store(KEYS[2:3])
    node.add([KEYS[0], KEYS[1], KEYS[3], KEYS[5]])
    wait = node.look(KEYS[:6])
    assert not node.fleet.is_over(wait)
    assert [op.keys for op in node.ops("fetch")] == [(KEYS[0], KEYS[1], KEYS[3])]


def test_requests_share_questions_and_fetches(node: TieredNode) -> None:
    node.add(KEYS[:4])
    first, second = node.fleet.look_for(KEYS[:4]), node.fleet.look_for(KEYS[:6])
    assert first is not None
    assert second is not None
    node.hear()
    assert node.store_of_names.batches == [("exists", 6)]
    assert not node.fleet.is_over(first)
    assert not node.fleet.is_over(second)
    assert len(node.ops("fetch")) == 1
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_over(first)
    assert node.fleet.is_over(second)


def test_a_request_takes_the_answer_to_the_question_of_another_one(node: TieredNode) -> None:
    node.add(KEYS[:4])
    node.store_of_names.lookups.shut()
    first = node.fleet.look_for(KEYS[:4])
    node.fleet.step()
    node.store_of_names.lookups.wait_arrived(1)
    second, third = node.fleet.look_for(KEYS[:4]), node.fleet.look_for(KEYS[:6])
    assert first is not None
    assert second is not None
    assert third is not None
    version = node.fleet._table.version
    node.store_of_names.lookups.open()
    node.eventually(lambda: node.fleet._table.version > version)
    assert not node.fleet.is_over(second)
    assert (second.state, third.state) == ("fetching", "asking")
    node.hear()
    assert not node.fleet.is_over(third)
    assert third.ops == second.ops
    assert node.store_of_names.batches == [("exists", 4), ("exists", 2)]
    assert node.fleet.status().counters.asked_blocks == 6


def test_blocks_that_arrive_while_a_request_asks_count_as_the_pools(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(100, 0.001)
    node.add(KEYS[:5])
    wait = node.fleet.look_for(KEYS[:5])
    assert wait is not None
    node.store(KEYS[:2])
    node.hear()
    assert not node.fleet.is_over(wait)
    assert [op.keys for op in node.ops("fetch")] == [tuple(KEYS[2:5])]
    assert node.fleet.status().decision.startswith("3 blocks take")
    assert "0.300 s to compute" in node.fleet.status().decision


def test_a_request_asks_again_if_keys_change_their_meaning_meanwhile(node: TieredNode) -> None:
    node.add(KEYS[:2])
    node.fleet._table.note(KEYS[:1], present=True)
    wait = node.fleet.look_for(KEYS[:2])
    assert wait is not None
    node.fleet.reset()
    assert node.fleet.is_over(wait), "what was known of the first key meant other weights"
    assert node.ops("fetch") == []
    node.fleet.begin_epoch("f")
    wait = node.look(KEYS[:2])
    node.fleet.note_purged()
    node.fleet.step()
    assert not node.fleet.is_over(wait)
    node.hear()
    assert not node.fleet.is_over(wait)
    assert [op.keys for op in node.ops("fetch")] == [tuple(KEYS[:2])]
    assert node.store_of_names.batches == [("exists", 2)] * 2


def test_what_was_absent_is_not_asked_for_again_soon(node: TieredNode, clock: FakeClock) -> None:
    assert not node.fetch_all(KEYS[:3])
    assert node.fleet.look_for(KEYS[:3]) is None
    clock.advance(2.0)
    node.add(KEYS[:3])
    assert node.fetch_all(KEYS[:3])
    assert node.store_of_names.batches == [("exists", 3)] * 2


def test_a_store_that_does_not_answer_costs_a_request_the_lookup_wait(node: TieredNode, clock: FakeClock) -> None:
    node.add(KEYS[:3])
    node.store_of_names.lookups.shut()
    wait = node.fleet.look_for(KEYS[:3])
    assert wait is not None
    node.fleet.step()
    node.store_of_names.lookups.wait_arrived(1)
    clock.advance(0.019)
    assert not node.fleet.is_over(wait)
    clock.advance(0.001)
    assert node.fleet.is_over(wait)
    assert node.fleet.status().counters.cut_waits == 1


def test_a_request_waits_no_longer_than_the_deadline_and_takes_what_has_arrived(
    make_engine: MakeEngine, clock: FakeClock, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.fleettier.MAX_BATCH_OBJECTS", 2)
    node = TieredNode(make_engine(12, RANKS), clock, TierSettings(deadline=2.0), eventually)
    try:
        node.add(KEYS[:6])
        wait = node.look(KEYS[:6])
        assert not node.fleet.is_over(wait)
        for rank in range(RANKS):
            node.run(rank, node.waiting(rank)[0])
        node.fleet.step()
        clock.advance(1.99)
        assert not node.fleet.is_over(wait)
        clock.advance(0.01)
        assert node.fleet.is_over(wait)
        assert node.loaded(KEYS[:6]) == 2
        assert len(node.ops("fetch")) == 2, "the rest goes on, for others"
        node.run_all()
        assert node.loaded(KEYS[:6]) == 6
    finally:
        node.fleet.close()


def test_a_request_waits_no_longer_than_computing_takes(make_node: MakeNode, clock: FakeClock) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(100, 1.0)
    node.add(KEYS[:5])
    wait = node.look(KEYS[:5])
    assert not node.fleet.is_over(wait)
    clock.advance(0.49)
    assert not node.fleet.is_over(wait)
    clock.advance(0.01)
    assert node.fleet.is_over(wait)


def test_nothing_is_fetched_where_it_does_not_pay_except_to_measure(make_node: MakeNode, clock: FakeClock) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(1, 100.0)
    node.add(KEYS)
    assert not node.fetch_all(KEYS)
    assert [len(op.keys) for op in node.ops("fetch")] == [12], "which no request waits for"
    node.run_all()
    node.fleet.step()
    node.fleet.break_even.note_fetch(100, 10_000.0)
    clock.advance(0.9)
    node.offload.admin.purge(everything=True).run()
    assert node.fleet.look_for(KEYS) is None
    node.hear()
    assert node.ops("fetch") == []
    assert node.fleet.status().counters.declined_requests == 2
    assert "does not pay" in node.fleet.status().decision
    clock.advance(0.1)
    assert node.fleet.look_for(KEYS) is None
    node.hear()
    assert len(node.ops("fetch")) == 1


def test_while_fetches_do_not_pay_no_request_waits_to_hear_what_the_store_has(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS)
    node.fleet.break_even.note_fetch(1, 100.0)
    assert not node.fetch_all(KEYS[:3])
    node.run_all()
    node.fleet.step()
    node.store_of_names.lookups.shut()
    assert node.fleet.look_for(KEYS[3:6]) is None
    assert node.fleet.look_for(KEYS[6:9]) is None
    node.fleet.step()
    node.store_of_names.lookups.wait_arrived(2)
    assert node.fleet.status().counters.requests == 3
    for _ in range(9):
        node.fleet.break_even.note_fetch(100, 1.0)  # now they would
    node.store_of_names.lookups.open()
    node.hear()
    assert node.store_of_names.batches == [("exists", 3)] * 2, "of one request at a time"
    assert "a fetch pays" in node.fleet.status().decision
    assert node.fleet.is_idle
    assert node.fetch_all(KEYS[6:9])


def test_a_store_that_is_lost_while_fetches_do_not_pay_leaves_nothing_behind(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS)
    node.fleet.break_even.note_fetch(1, 100.0)
    assert not node.fetch_all(KEYS[:3])
    node.run_all()
    node.fleet.step()
    node.store_of_names.error = TierUnavailableError("no master")
    assert node.fleet.look_for(KEYS[3:6]) is None
    node.hear()
    assert node.fleet.status().breaker == "open"
    node.fleet.step()
    assert node.fleet.is_idle


def test_the_gate_opens_when_the_store_gets_quick(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS[:3])
    assert not node.fetch_all(KEYS[:3]), "it has not been measured"
    node.run_all()
    node.fleet.step()
    assert node.fleet.break_even.rate.bytes_per_second
    node.add(KEYS[3:6])
    assert node.fetch_all(KEYS[3:6])


def test_an_outage_leaves_the_store_alone_until_it_answers_a_probe(node: TieredNode, clock: FakeClock) -> None:
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    (op,) = node.ops("fetch")
    node.outage(op)
    node.run(0, op)
    node.store_of_names.error = TierUnavailableError("no master")
    node.fleet.step()
    assert node.fleet.is_over(wait)
    assert (node.fleet.status().state, node.fleet.status().breaker) == ("down", "open")
    assert node.fleet.look_for(KEYS[3:]) is None
    node.store(KEYS[6:8])
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_idle, "what waits to be put has to wait"
    assert node.fleet.status().waiting_blocks == 2, "in the queue, which is bounded"
    asked = len(node.store_of_names.batches)
    for _ in range(3):
        clock.advance(1.6)
        node.hear()
        assert len(node.store_of_names.batches) == asked
        assert node.ops("put") == []
    clock.advance(0.2)
    node.hear()
    assert node.store_of_names.batches[asked:] == [("exists", 1)], "the probe"
    assert node.fleet.status().breaker == "open"
    node.store_of_names.error = None
    clock.advance(5.0)
    node.hear()
    assert node.fleet.status().state == "on"
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[6:8])]
    assert node.fetch_all(KEYS[:3])


def test_a_lookup_without_an_answer_opens_the_breaker(node: TieredNode) -> None:
    node.store_of_names.error = TierUnavailableError("no master")
    assert not node.fetch_all(KEYS[:3])
    status = node.fleet.status()
    assert (status.breaker, status.reason, status.opened) == ("open", "no master", 1)


def test_a_miss_after_a_hit_is_forgotten_at_once(node: TieredNode) -> None:
    node.add(KEYS[:3])
    del node.objects[KEYS[1], 1]
    assert node.fetch_all(KEYS[:3])
    assert node.loaded(KEYS) == 1
    assert node.fleet.look_for(KEYS[:3]) is None, "what could not be fetched is not tried again at once"


def test_what_was_absent_is_known_to_be_there_once_it_was_put(node: TieredNode) -> None:
    assert not node.fetch_all(KEYS[:3])
    node.store(KEYS[:3])
    node.fleet.step()
    node.run_all()
    node.fleet.step()
    node.offload.admin.purge(everything=True).run()
    wait = node.fleet.look_for(KEYS[:3])
    assert wait is not None
    assert wait.state == "fetching"
    assert node.store_of_names.batches == [("exists", 3)]


@pytest.mark.parametrize("write", ["through", "selective"])
def test_blocks_are_put_by_the_policy(make_node: MakeNode, write: WriteMode) -> None:
    node = make_node(write=write)
    node.store(KEYS[:4])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == ([tuple(KEYS[:4])] if write == "through" else [])
    node.run_all()
    node.fleet.step()
    node.fleet.note_used(KEYS[:2])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == ([] if write == "through" else [tuple(KEYS[:2])])
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_idle
    assert node.fleet.status().counters.put_blocks == (4 if write == "through" else 2)


def test_with_back_the_coldest_blocks_are_put_and_make_room(make_node: MakeNode) -> None:
    node = make_node(slots=16, write="back")
    chains = [[bytes([1, 1, chain, at]) for at in range(4)] for chain in range(4)]
    for chain in chains:
        node.store(chain)
    node.fleet.step()
    (op,) = node.ops("put")
    assert set(op.keys) <= set(chains[0]), "of the oldest"
    assert len(op.keys) == 2
    assert node.engine.lookup(chains[0]) == 2
    node.fleet.step()
    assert len(node.ops("put")) == 1, "the slots on the way count"
    node.run_all()
    node.fleet.step()
    counts = node.offload.stats().pool.slots
    assert (counts.free, counts.cached) == (2, 14)
    node.offload.check_integrity()


def test_a_full_store_gets_nothing_for_a_while(node: TieredNode, clock: FakeClock) -> None:
    node.store(KEYS[:2])
    node.fleet.step()
    (op,) = node.ops("put")
    for rank in (1, 0):
        node.deliver()
        if op.op_id in node.queues[rank]:
            moved = node.move(rank, node.queues[rank][op.op_id], 1)
            done = TierCompletion(op.op_id, "done", moved=moved, full=True)
            node.engine.complete(rank, node.ranks[rank].boot_id, [done])
    node.fleet.step()
    node.store(KEYS[2:4])
    node.fleet.step()
    assert node.ops("put") == []
    clock.advance(1.0)
    node.store(KEYS[4:6])
    node.fleet.step()
    assert [one.keys for one in node.ops("put")] == [tuple(KEYS[4:6])]
    assert node.fleet.status().dropped_blocks == 2


def test_a_full_store_is_no_reason_to_evict(make_node: MakeNode, clock: FakeClock) -> None:
    node = make_node(slots=16, write="back")
    node.fleet._writes.note_full()
    for chain in range(4):
        node.store([bytes([1, 1, chain, at]) for at in range(4)])
    node.fleet.step()
    assert node.ops("put") == []
    assert node.offload.stats().pool.slots.cached == 16
    clock.advance(1.0)
    node.fleet.step()
    assert len(node.ops("put")) == 1


def test_what_the_store_holds_decides_what_is_put_and_how_quickly(
    make_engine: MakeEngine, clock: FakeClock, eventually: Eventually
) -> None:
    store, engine = ControlledStore(), make_engine(12, RANKS)
    block_bytes = RANKS * engine.pool.config.slot_bytes
    store.capacity = StoreCapacity(50 * block_bytes, put_bytes_per_second=3.0 * block_bytes)
    node = TieredNode(engine, clock, TierSettings(), eventually, store)
    try:
        node.store(KEYS[:5])
        node.fleet.step()
        assert [len(op.keys) for op in node.ops("put")] == [3]
        node.run_all()
        assert not node.fleet.is_idle
        clock.advance(1.0)
        node.fleet.step()
        assert [len(op.keys) for op in node.ops("put")] == [2]
        node.run_all()
        assert node.fleet.status().write_decision == "all blocks are put: new blocks are being counted"
        clock.advance(59.0)
        node.fleet.step()
        assert node.fleet.status().write_decision.startswith(
            "all blocks are put: the store holds the new blocks of 600 s"
        )
        node.store(KEYS[5:12])
        clock.advance(30.0)
        node.fleet.step()
        node.run_all()
        clock.advance(30.0)
        node.fleet.step()
        assert node.fleet.status().write_decision.startswith("blocks are put at their second use: the store holds the")
        assert node.fleet.status().write == "auto"
    finally:
        node.fleet.close()


def epoch_scenario(node: TieredNode) -> None:
    """The weights change while a fetch is under way, and something waits to be put."""
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.store(KEYS[6:8])
    node.fleet.reset()
    node.offload.admin.purge(everything=True).run()
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_over(wait)
    assert node.engine.lookup(KEYS) == 0, "a fetch from before the new weights is visible"
    status = node.fleet.status()
    assert (status.state, status.reason) == ("off", WEIGHTS_CHANGED)
    node.fleet.reset("they are being loaded")
    assert node.fleet.status().reason == "they are being loaded"
    node.store(KEYS[8:10])
    node.fleet.step()
    assert node.ops("put") == [], "a block of weights without a name was put"
    assert node.fleet.look_for(KEYS[:3]) is None
    asked = len(node.store_of_names.batches)
    node.fleet.begin_epoch("g")
    node.store(KEYS[10:])
    node.fleet.step()
    assert [(op.fingerprint, op.keys) for op in node.ops("put")] == [("g", tuple(KEYS[10:]))]
    assert not node.fetch_all(KEYS[:3]), "an object of the old weights was fetched"
    assert len(node.store_of_names.batches) == asked + 1
    node.run_all()
    node.fleet.step()
    node.offload.check_integrity()


def test_a_fresh_epoch_neither_puts_nor_fetches_until_its_weights_have_a_name(node: TieredNode) -> None:
    epoch_scenario(node)


def epochs_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetTier, "reset", lambda self, reason="": None)


def fetches_outlive_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierTraffic, "cancel_fetches", lambda self: 0)


def test_a_tier_that_was_never_on_says_why(node: TieredNode) -> None:
    off = FleetTier(
        node.offload, ControlledStore().open_lookups(), TierSettings(), None, off_reason="hashes are random"
    )
    assert (off.status().state, off.status().reason) == ("off", "hashes are random")
    assert off.look_for(KEYS) is None
    off.close()


def test_a_reset_stops_fetches_under_way(node: TieredNode) -> None:
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.fleet.reset()
    node.run_all()
    assert node.engine.lookup(KEYS[:3]) == 0


@pytest.mark.parametrize("mutate", [epochs_are_ignored, fetches_outlive_a_reset])
def test_an_epoch_that_is_ignored_is_noticed(
    node: TieredNode, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_reset_stops_fetches_under_way(node)


def test_an_operator_can_switch_it_off_and_on(node: TieredNode) -> None:
    node.add(KEYS[:3])
    node.fleet.set_bypassed(True)
    node.store(KEYS[4:6])
    node.hear()
    assert node.ops("put") == []
    assert node.fleet.look_for(KEYS[:3]) is None
    assert node.fleet.status().state == "bypassed"
    node.fleet.set_bypassed(False)
    assert node.fetch_all(KEYS[:3])
    assert node.fleet.status().state == "on"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"deadline": 0.0}, "deadline is 0.0; allowed: more than 0 seconds"),
        ({"lookup_wait": -1.0}, "lookup_wait is -1.0"),
        ({"prefill_rate": 0.0}, "prefill_rate is 0.0; allowed: more than 0 tokens per second"),
        ({"write": "around"}, "write is 'around'; allowed: auto or through or selective or back"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TierSettings(**settings)


# -- what operators order ----------------------------------------------------------------------------------------------


def test_a_bypass_ends_when_its_time_is_over(node: TieredNode) -> None:
    node.add(KEYS[:3])
    node.fleet.set_bypassed(True, 60.0)
    assert node.fleet.look_for(KEYS[:3]) is None
    node.clock.advance(59.0)
    assert node.fleet.status().state == "bypassed"
    node.clock.advance(1.0)
    assert node.fleet.status().state == "on"
    assert node.fetch_all(KEYS[:3])


def test_what_waited_to_be_put_when_the_bypass_began_is_not_put_after_it(node: TieredNode) -> None:
    node.store(KEYS[:3])
    node.fleet.set_bypassed(True)
    node.fleet.step()
    node.fleet.set_bypassed(False)
    node.fleet.step()
    assert node.ops("put") == []
    node.store(KEYS[3:4])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[3:4])]


def test_weights_that_an_operator_names_are_used_from_the_next_step_on(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    assert node.fleet.status().reason == "an operator has named the weights: it begins with the engine's next step"
    assert node.fleet.look_for(KEYS[:3]) is None
    node.fleet.step()
    assert (node.fleet.fingerprint, node.fleet.status().state) == ("g", "on")
    node.add(KEYS[:3], "g")
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    assert node.ops("fetch")[0].fingerprint == "g"


def test_a_name_from_before_another_reset_is_that_of_weights_that_are_gone(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    node.fleet.reset()
    node.fleet.step()
    assert node.fleet.fingerprint is None


def test_weights_that_have_a_name_keep_it(node: TieredNode) -> None:
    """Else blocks that were computed with them would be put under the new one."""
    node.fleet.name_weights("g")
    node.fleet.step()
    assert node.fleet.fingerprint == "f"


def test_the_last_name_that_an_operator_gives_counts(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    node.fleet.name_weights("h")
    node.fleet.step()
    assert node.fleet.fingerprint == "h"


def test_after_a_purge_the_store_is_asked_again(node: TieredNode) -> None:
    node.look(KEYS[:1])
    assert node.fleet.look_for(KEYS[:1]) is None, "the answer is known"
    node.fleet.note_purged()
    node.fleet.step()
    node.look(KEYS[:1])
    assert node.fleet.status().counters.lookups == 2


def test_what_was_fetched_saved_the_time_to_compute_it(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(100, 0.001)
    node.add(KEYS[:3])
    assert node.fetch_all(KEYS[:3])
    assert node.fleet.status().counters.saved_seconds == pytest.approx(3 * BLOCK_TOKENS / 100.0)


def test_a_closed_tier_begins_nothing_and_nobody_waits_for_it(node: TieredNode) -> None:
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.store(KEYS[6:8])
    node.fleet.close()
    assert node.fleet.is_over(wait)
    node.fleet.step()
    assert node.ops("put") == []
    assert node.fleet.look_for(KEYS[3:5]) is None
    assert node.fleet._begin_fetch(KEYS[8:9]) == [], "an op began after the end"


def test_ops_of_the_tier_that_a_session_had_before_do_not_confuse_the_next_one(
    node: TieredNode, clock: FakeClock
) -> None:
    node.add(KEYS[:3])
    assert not node.fleet.is_over(node.look(KEYS[:3]))
    assert node.fleet.traffic.in_flight == 1
    node.fleet.close()
    node.run_all()
    assert node.fleet.traffic.in_flight == 0
    node.fleet = FleetTier(node.offload, node.store_of_names.open_lookups(), TierSettings(), "f", clock=clock)
    node.tier = node.fleet.traffic
    node.fleet.step()
    assert node.fleet.status().counters.fetched_blocks == 0
    node.store(KEYS[4:6])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[4:6])]
