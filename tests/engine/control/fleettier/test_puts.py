"""Which blocks are put, and when."""

from __future__ import annotations

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, MakeNode, TieredNode

from kvstow.messages import TierCompletion
from kvstow.testing.fakes import FakeClock


def test_every_block_is_put_when_it_is_stored(node: TieredNode) -> None:
    node.store(KEYS[:4])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[:4])]
    node.run_all()
    node.fleet.step()
    assert node.ops("put") == []
    assert node.fleet.is_idle
    assert node.fleet.status().counters.put_blocks == 4


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
    assert node.fleet.status().counters.dropped_blocks == 2


def test_no_more_is_put_at_once_than_a_share_of_the_pool(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.control.fleettier.MAX_BATCH_OBJECTS", 2)
    node = make_node()
    node.store(KEYS[:5])
    node.fleet.step()
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[:2])]
    node.run_all()
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[2:4])]
