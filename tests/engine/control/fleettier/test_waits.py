"""What a request waits for, and what it finds then."""

from __future__ import annotations

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, RANKS, MakeNode, TieredNode

from kvstow.testing.fakes import FakeClock


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
    make_node: MakeNode, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.fleettier.MAX_BATCH_OBJECTS", 2)
    node = make_node(deadline=2.0)
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
