"""The memory double of a store, with which the control plane is tested."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.doubles.memoryblockstore import MemoryBlockStore
from tests.engine.tier.blockstorecontract import BlockStoreContract, keys_of

from kvstow.tier.blockstore import BlockStore, BlockTransfer, Piece, StoredLayout


class TestMemoryBlockStore(BlockStoreContract):
    @pytest.fixture(params=[False, True], ids=["at once", "later"])
    def store(self, request: pytest.FixtureRequest) -> Iterator[BlockStore]:
        reading, writing = os.pipe()
        store = MemoryBlockStore()
        store.answers_later = request.param
        store.start(writing)
        yield store
        store.close()
        os.close(reading)
        os.close(writing)


def test_nothing_ends_before_it_is_run_and_reads_go_first() -> None:
    store, names = MemoryBlockStore(places=2), "f"
    pieces: list[Piece] = []
    pool = store.join(StoredLayout("p", (64,), "i", "o"), pieces.extend)
    keys = keys_of(range(3))
    pool.write(BlockTransfer(1, names, keys, (1, 2, 3)))
    pool.read(BlockTransfer(2, names, keys[:1], (4,)))
    assert not pieces
    store.run()
    assert [(one.op_id, one.good, one.bad) for one in pieces] == [(2, (), (4,)), (1, (1, 2, 3), ())]
    assert pool.has(names, keys, lambda found: None) == [False, True, True], "the oldest has made room"
    pool.offer(names, keys[1:2], is_use=True)
    pool.write(BlockTransfer(3, names, keys[:1], (1,)))
    store.run()
    assert pool.has(names, keys, lambda found: None) == [True, True, False], "a use keeps a block"
