"""Which blocks are put, and when."""

from __future__ import annotations

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, RANKS, MakeNode, TieredNode

from kvstow.messages import TierCompletion
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import StoreCapacity
from kvstow.tier.writepolicy import WriteMode


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


def test_with_back_nothing_is_put_during_a_drain(make_node: MakeNode) -> None:
    node = make_node(slots=16, write="back")
    for chain in range(4):
        node.store([bytes([1, 1, chain, at]) for at in range(4)])
    node.offload.admin.drain("all", None)
    node.fleet.step()
    assert node.ops("put") == []
    assert node.offload.stats().pool.slots.cached == 16
    node.offload.admin.undrain()
    node.fleet.step()
    assert len(node.ops("put")) == 1


def test_with_back_what_the_store_has_is_not_put_again(make_node: MakeNode) -> None:
    """Fetched blocks that get cold are left to the pool to evict."""
    node = make_node(slots=16, write="back")
    node.add(KEYS[:4])
    assert node.fetch_all(KEYS[:4])
    for chain in range(3):
        node.store([bytes([1, 1, chain, at]) for at in range(4)])
    node.fleet.step()
    assert node.ops("put") == []
    node.fleet.note_purged()
    node.fleet.step()
    assert [set(op.keys) <= set(KEYS[:4]) for op in node.ops("put")] == [True], "the store may have lost them"


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
    node.fleet._puts.policy.note_full()
    for chain in range(4):
        node.store([bytes([1, 1, chain, at]) for at in range(4)])
    node.fleet.step()
    assert node.ops("put") == []
    assert node.offload.stats().pool.slots.cached == 16
    clock.advance(1.0)
    node.fleet.step()
    assert len(node.ops("put")) == 1


def test_what_the_store_holds_decides_what_is_put_and_how_quickly(make_node: MakeNode, clock: FakeClock) -> None:
    store, block_bytes = ControlledStore(), RANKS * 64
    store.capacity = StoreCapacity(50 * block_bytes, put_bytes_per_second=3.0 * block_bytes)
    node = make_node(store=store)
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
    assert node.fleet.status().write_decision.startswith("all blocks are put: the store holds the new blocks of 600 s")
    node.store(KEYS[5:12])
    clock.advance(30.0)
    node.fleet.step()
    node.run_all()
    clock.advance(30.0)
    node.fleet.step()
    assert node.fleet.status().write_decision.startswith("blocks are put at their second use: the store holds the")
    assert node.fleet.status().write == "auto"


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
