"""GPU blocks: references that are taken once and given back once."""

from __future__ import annotations

from tests.service.connectors.engine_core.blockpool import FakeBlockPool

from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks


def test_a_held_block_is_not_handed_out() -> None:
    pool = FakeBlockPool(4)
    gpu = GPUBlocks(pool)
    gpu.hold_sources(7, [2, 1])
    assert gpu.num_sources() == 2
    assert pool.free == [3]
    assert [block.ref_cnt for block in pool.blocks[1:]] == [1, 1, 0]


def test_a_block_of_two_stores_is_free_after_both() -> None:
    pool = FakeBlockPool(4)
    gpu = GPUBlocks(pool)
    gpu.hold_sources(7, [1])
    gpu.hold_sources(8, [1, 2])
    gpu.free_sources(7)
    assert sorted(pool.free) == [3]
    gpu.free_sources(8)
    assert sorted(pool.free) == [1, 2, 3]
    assert not gpu.has_sources


def test_a_release_is_idempotent() -> None:
    pool = FakeBlockPool(4)
    gpu = GPUBlocks(pool)
    gpu.hold_sources(7, [1])
    for _ in range(2):
        gpu.free_sources(7)
    gpu.free_sources(8)
    assert pool.blocks[1].ref_cnt == 0


def three_held(num_blocks: int) -> tuple[FakeBlockPool, GPUBlocks]:
    """A pool of blocks that vLLM knows by a hash; op 7 stores 1, 2 and 3."""
    pool = FakeBlockPool(num_blocks)
    for block in pool.blocks:
        block.block_hash = b"%d" % block.block_id
    gpu = GPUBlocks(pool)
    gpu.hold_sources(7, [1, 2, 3])
    return pool, gpu


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool, gpu = three_held(4)
    gpu.free_sources(7)
    assert pool.free == [3, 2, 1]


def test_blocks_from_the_head_of_the_queue_return_there() -> None:
    pool, gpu = three_held(5)
    pool.touch([pool.blocks[2]])  # a request has found it meanwhile
    for _ in range(2):
        gpu.free_sources(7, to_front=True)
    assert pool.free == [1, 3, 4]
    assert [block.ref_cnt for block in pool.blocks[1:]] == [0, 1, 0, 0]
