"""What a store that fails costs."""

from __future__ import annotations

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, RANKS, MakeNode, TieredNode

from kvstow.errors import TierUnavailableError
from kvstow.messages import TierCompletion
from kvstow.testing.fakes import FakeClock


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
    assert (status.breaker, status.reason, status.counters.breaker_opened) == ("open", "no master", 1)


@pytest.mark.parametrize("block_seconds", [0.01, 1.0], ids=["a fetch pays", "it would only measure"])
def test_a_store_that_was_lost_since_a_request_asked_is_not_fetched_from(
    make_node: MakeNode, block_seconds: float
) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(1, 0.01)  # computing takes 0.1 s
    node.add(KEYS[:6])
    assert not node.fleet.is_over(node.look(KEYS[:3]))
    (op,) = node.ops("fetch")
    node.store_of_names.lookups.shut()
    wait = node.fleet.look_for(KEYS[3:6])
    assert wait is not None
    node.fleet.step()
    node.store_of_names.lookups.wait_arrived(2)
    node.outage(op)
    node.run(0, op)
    node.fleet.step()
    assert node.fleet.status().breaker == "open"
    for _ in range(9):
        node.fleet.break_even.note_fetch(100, 100 * block_seconds)
    node.store_of_names.lookups.open()
    node.hear()
    assert node.fleet.is_over(wait)
    assert node.ops("fetch") == []


def fail_most(node: TieredNode, keys: list[bytes]) -> None:
    """The store moves one block of a fetch and fails for the rest."""
    node.add(keys)
    assert not node.fleet.is_over(node.look(keys))
    (op,) = node.ops("fetch")
    for rank in range(RANKS):
        node.move(rank, op, 1)
        done = TierCompletion(op.op_id, "done", moved=1, failed=len(keys) - 1)
        node.engine.complete(rank, node.ranks[rank].boot_id, [done])
    node.fleet.step()


def test_three_transfers_in_a_row_that_move_too_little_open_the_breaker(node: TieredNode) -> None:
    fail_most(node, KEYS[:3])
    fail_most(node, KEYS[3:6])
    assert node.fleet.status().state == "on"
    fail_most(node, KEYS[6:9])
    status = node.fleet.status()
    assert (status.state, status.reason) == ("down", "2 of 3 objects could not be moved")


def test_transfers_that_move_too_little_now_and_then_do_not(node: TieredNode) -> None:
    fail_most(node, KEYS[:3])
    fail_most(node, KEYS[3:6])
    node.add(KEYS[9:12])
    assert node.fetch_all(KEYS[9:12])
    fail_most(node, KEYS[6:9])
    assert node.fleet.status().state == "on"
