"""Whether a fetch pays, and what happens while none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.engine.control.fleettier.tierednode import BLOCK_TOKENS, KEYS, MakeNode, TieredNode

from kvstow.control.tierneeds import Needed, Needs
from kvstow.errors import TierUnavailableError
from kvstow.testing.fakes import FakeClock


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


def test_while_the_store_was_not_measured_no_request_waits_to_hear_what_it_has(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS[:3])
    assert node.fleet.look_for(KEYS[:3]) is None
    node.hear()
    assert [len(op.keys) for op in node.ops("fetch")] == [3], "which measures it"


def make_shut(make_node: MakeNode, seconds: float = 100.0) -> TieredNode:
    """The store has all KEYS. A fetch took so long for a block, which is computed in 0.1 s, and one was declined."""
    node = make_node(prefill_rate=100.0)
    node.add(KEYS)
    node.fleet.break_even.note_fetch(1, seconds)
    assert not node.fetch_all(KEYS[:3])
    node.run_all()
    node.fleet.step()
    return node


def test_while_fetches_do_not_pay_no_request_waits_to_hear_what_the_store_has(make_node: MakeNode) -> None:
    node = make_shut(make_node)
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


def test_what_a_request_that_did_not_wait_has_stored_itself_does_not_open_the_gate(make_node: MakeNode) -> None:
    node = make_shut(make_node, seconds=0.15)
    for _ in range(9):
        node.fleet.break_even.note_fetch(100, 15.0)
    assert node.fleet.look_for(KEYS[3:6]) is None
    node.store(KEYS[4:6])
    node.hear()
    assert node.fleet.status().decision.startswith("3 blocks take 0.450 s to fetch and 0.300 s to compute")
    assert not node.fleet.break_even.pays


class Leading:
    """The needs of a model whose hits are leading runs, as of one with several groups."""

    most = 6

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        number = next((at for at, present in enumerate(has(KEYS[3:9])) if not present), 6)
        number = number if most is None else min(number, most)
        return Needed(KEYS[3 : 3 + number], number)


@pytest.mark.parametrize("needs", [None, Leading()])
def test_what_the_pool_has_is_neither_fetched_nor_computed(make_node: MakeNode, needs: Needs | None) -> None:
    node = make_shut(make_node)
    for _ in range(9):
        node.fleet.break_even.note_fetch(100, 1.0)
    node.store(KEYS[3:7])
    assert node.fleet.look_for(KEYS[3:9], 0, needs) is None
    node.hear()
    assert node.fleet.status().decision.startswith("2 blocks take")
    assert "and 0.200 s to compute: a fetch pays" in node.fleet.status().decision


def test_a_store_that_is_lost_while_fetches_do_not_pay_leaves_nothing_behind(make_node: MakeNode) -> None:
    node = make_shut(make_node)
    node.store_of_names.error = TierUnavailableError("no master")
    assert node.fleet.look_for(KEYS[3:6]) is None
    node.hear()
    assert node.fleet.status().breaker == "open"
    node.fleet.step()
    assert node.fleet.is_idle


def test_the_gate_opens_when_the_store_gets_quick(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS[:3])
    assert node.fleet.look_for(KEYS[:3]) is None, "it has not been measured"
    node.hear()
    node.run_all()
    node.fleet.step()
    assert node.fleet.break_even.rate.per_second
    node.add(KEYS[3:6])
    assert node.fetch_all(KEYS[3:6])


def test_what_was_fetched_saved_the_time_to_compute_it(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(100, 0.001)
    node.add(KEYS[:3])
    assert node.fetch_all(KEYS[:3])
    assert node.fleet.status().counters.saved_seconds == pytest.approx(3 * BLOCK_TOKENS / 100.0)


def test_a_request_that_has_asked_does_not_wait_for_a_fetch_that_pays_no_longer(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS[:3])
    node.fleet.break_even.note_fetch(1, 0.01)  # computing takes 0.1 s
    wait = node.fleet.look_for(KEYS[:3])
    assert wait is not None
    for _ in range(9):
        node.fleet.break_even.note_fetch(100, 100.0)
    node.hear()
    assert node.fleet.is_over(wait)
    assert "does not pay" in node.fleet.status().decision


def test_fetches_under_way_make_the_next_one_later(make_node: MakeNode) -> None:
    node = make_node(prefill_rate=100.0)
    node.fleet.break_even.note_fetch(1, 0.05)  # computing takes 0.1 s
    node.add(KEYS[:8])
    assert not node.fleet.is_over(node.look(KEYS[:6]))
    wait = node.look(KEYS[6:8])
    assert node.fleet.is_over(wait)
    assert node.fleet.status().decision.startswith("2 blocks take 0.400 s to fetch and 0.200 s to compute")
    assert [len(op.keys) for op in node.ops("fetch")] == [6]


def test_the_store_is_measured_with_one_fetch_at_a_time(make_node: MakeNode, clock: FakeClock) -> None:
    node = make_node(prefill_rate=100.0)
    node.add(KEYS[:6])
    assert node.fleet.look_for(KEYS[:3]) is None
    node.hear()
    clock.advance(60.0)
    node.add(KEYS[:6])
    assert node.fleet.look_for(KEYS[3:6]) is None
    node.hear()
    assert [op.keys for op in node.ops("fetch")] == [tuple(KEYS[:3])]
