"""The backlog: what is offered again, when, in which order; GPU blocks that are held; the pause after a failure."""

from __future__ import annotations

from tests.service.connectors.engine_core.blockpool import FakeBlockPool

from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.gpublocks import Backlog, GPUBlocks
from kvstow_service.connectors.engine_core.stores import RetryPause

HASH_BYTES = 8


def make_gpu(count: int) -> GPUBlocks:
    gpu = GPUBlocks(FakeBlockPool(count))
    gpu.hash_bytes = HASH_BYTES
    for block in gpu.pool.blocks:
        block.block_hash = block.block_id.to_bytes(HASH_BYTES, "big") + (3).to_bytes(4, "big")
    return gpu


def take(backlog: Backlog, count: int = 100, unwritten: frozenset[int] = frozenset()) -> list[int]:
    return backlog.take_cached(count, unwritten).blocks


def test_blocks_come_in_the_order_in_which_they_were_added_and_each_once() -> None:
    backlog = Backlog(make_gpu(10))
    backlog.add_blocks([5, 3, 5])
    backlog.add_blocks([3, 7])
    assert len(backlog) == 3
    assert take(backlog, 2) == [5, 3]
    assert take(backlog) == [7]
    assert take(backlog) == []
    backlog.add_blocks([5])
    assert take(backlog) == [5]


def test_a_block_is_offered_under_the_hash_that_it_has_now() -> None:
    gpu = make_gpu(4)
    backlog = Backlog(gpu)
    backlog.add_blocks([1, 2])
    gpu.pool.blocks[1].block_hash = b"other123" + (1).to_bytes(4, "big")
    offer = backlog.take_cached(100, frozenset())
    assert offer.keys == [make_key(1, b"other123"), make_key(3, (2).to_bytes(HASH_BYTES, "big"))]


def test_a_block_that_vllm_does_not_cache_is_forgotten() -> None:
    gpu = make_gpu(4)
    backlog = Backlog(gpu)
    backlog.add_blocks([1, 2])
    gpu.pool.blocks[1].block_hash = None
    assert take(backlog) == [2]
    assert len(backlog) == 0


def test_a_block_that_this_step_writes_waits() -> None:
    backlog = Backlog(make_gpu(4))
    backlog.add_blocks([1, 2])
    assert take(backlog, unwritten=frozenset({1})) == [2]
    assert len(backlog) == 1
    backlog.add_blocks([1])
    assert take(backlog) == [1]


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


def test_blocks_from_the_head_of_the_queue_return_there() -> None:
    pool = FakeBlockPool(5)
    gpu = GPUBlocks(pool)
    gpu.hold_sources(7, [1, 2, 3])
    pool.touch([pool.blocks[2]])  # a request has found it meanwhile
    for _ in range(2):
        gpu.free_sources(7, to_front=True)
    assert pool.free == [1, 3, 4]
    assert [block.ref_cnt for block in pool.blocks[1:]] == [0, 1, 0, 0]


def steps_until_retry(pause: RetryPause) -> int:
    for steps in range(1000):
        if not pause:
            return steps
        pause.step()
    raise AssertionError("it never ends")


def test_each_failure_in_a_row_makes_the_pause_longer_up_to_a_bound() -> None:
    pause = RetryPause()
    waited = []
    for _ in range(12):
        pause.failed()
        waited.append(steps_until_retry(pause))
    assert waited == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    pause.failed()
    pause.succeeded()
    assert not pause
    pause.failed()
    assert not pause


def test_what_fails_during_a_pause_does_not_make_it_longer() -> None:
    pause = RetryPause()
    for _ in range(100):
        pause.failed()
    assert steps_until_retry(pause) == 1
