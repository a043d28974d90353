"""The backlog: what is offered again, when, in which order; GPU blocks that are held; the pause after a failure."""

from __future__ import annotations

from tests.service.connectors.engine_core.blockpool import FakeBlockPool

from kvstow_service.connectors.engine_core.gpublocks import Backlog, GPUBlocks

HASH_BYTES = 8


def make_gpu(count: int) -> GPUBlocks:
    gpu = GPUBlocks(FakeBlockPool(count))
    gpu.hash_bytes = HASH_BYTES
    for block in gpu.pool.blocks:
        block.block_hash = block.block_id.to_bytes(HASH_BYTES, "big") + (3).to_bytes(4, "big")
    return gpu


def take(backlog: Backlog, count: int = 100, unwritten: frozenset[int] = frozenset()) -> list[int]:
    return backlog.take_cached(count, unwritten).blocks


def test_it_is_no_larger_than_the_gpu() -> None:
    backlog = Backlog(make_gpu(4))
    for _ in range(10):
        backlog.add_blocks(range(4))
    assert len(backlog) == 4
    backlog.forget_backlog()
    assert (len(backlog), take(backlog)) == (0, [])


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
