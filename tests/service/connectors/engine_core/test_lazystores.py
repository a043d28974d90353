"""Lazy stores: the first of the free queue, each content once."""

from __future__ import annotations

from tests.service.connectors.engine_core.vllmhost import FULL, LARGE, FakeRequest, VllmHost, keys_of

from kvstow.messages import Op
from kvstow_service.connectors.engine_core.kvgroups import KVGroups


def lazy_host(ahead: int, gpu_blocks: int = 9, groups: KVGroups | None = None) -> VllmHost:
    return VllmHost(groups or KVGroups((FULL,), 2), gpu_blocks=gpu_blocks, lazy_blocks=ahead)


def fill(host: VllmHost, name: str, count: int) -> FakeRequest:
    """A request of `count` blocks has come and gone; nothing was copied."""
    request = FakeRequest(name, name * 2 * count)
    host.run(request, copy=False)
    host.finish(request)
    return request


def stores(host: VllmHost) -> tuple[Op, ...]:
    return host.step(copy=False).stores.ops


def test_blocks_far_from_eviction_are_not_stored() -> None:
    host = lazy_host(ahead=4)
    fill(host, "a", 4)  # four blocks of eight were never used: they come first
    assert stores(host) == ()
    assert not host.side.has_pending_stores


def test_the_next_blocks_to_be_evicted_are_stored() -> None:
    host = lazy_host(ahead=6)
    fill(host, "a", 4)
    endangered = host.pool.free[4:6]
    (op,) = stores(host)
    assert op.blocks == tuple(endangered)
    host.copy()
    assert host.stored() == set(keys_of("aaaaaaaa")[2:])


def test_a_store_leaves_the_order_of_eviction_as_it_was() -> None:
    host = lazy_host(ahead=3, gpu_blocks=7)
    fill(host, "a", 3)
    oldest = host.pool.free[3:]
    fill(host, "b", 3)  # takes the blocks that were never used: those of "a" are being stored
    younger = host.pool.free
    assert len(younger) == 3
    host.copy()
    host.step()
    assert host.pool.free == oldest + younger


def test_a_content_is_offered_once() -> None:
    host = lazy_host(ahead=8)
    fill(host, "a", 4)
    assert len(stores(host)) == 1
    host.copy()
    for _ in range(3):
        assert stores(host) == ()
    assert host.outcomes == {"stored": 4}


def test_blocks_that_the_pool_has_are_not_stored() -> None:
    host = lazy_host(ahead=8)
    keys = keys_of("aaaaaaaa")
    host.store(*keys[:3])
    fill(host, "a", 4)
    (op,) = stores(host)
    assert len(op.blocks) == 1
    host.copy()
    assert host.stored() == set(keys)
    assert host.engine.stats().stores["skipped_already_cached"] == 0


def test_a_block_with_another_content_is_offered_again() -> None:
    host = lazy_host(ahead=4, gpu_blocks=5)
    fill(host, "a", 4)
    stores(host)
    host.copy()
    host.side.settle()
    fill(host, "b", 4)
    (op,) = stores(host)
    assert len(op.blocks) == 4
    host.copy()
    assert host.stored() == {*keys_of("aaaaaaaa"), *keys_of("bbbbbbbb")}


def test_blocks_that_join_a_short_queue_are_seen() -> None:
    """The head of the queue stays, but it has not been looked at as far as it may."""
    host = lazy_host(ahead=8, gpu_blocks=9)
    host.store(*keys_of("aaaa"))
    first, second = FakeRequest("a", "aaaa"), FakeRequest("b", "bbbb")
    host.run(first, copy=False)
    host.run(second, copy=False)
    third = FakeRequest("c", "cccccccc")
    host.run(third, copy=False)
    host.finish(first)
    assert stores(host) == ()
    host.finish(second)
    assert len(stores(host)) == 1
    host.copy()
    assert host.stored() == {*keys_of("aaaa"), *keys_of("bbbb")}


def test_a_block_of_several_hash_blocks_is_stored_under_its_last_hash() -> None:
    host = lazy_host(ahead=32, gpu_blocks=33, groups=KVGroups((FULL, LARGE), 6))
    request = FakeRequest("r", "abcdefghijkl")
    host.run(request, copy=False)
    host.finish(request)
    host.step()
    assert host.stored() == {*keys_of(request.tokens), *keys_of(request.tokens, LARGE)}


def test_a_step_that_took_nothing_from_the_queue_does_not_walk_it() -> None:
    host = lazy_host(ahead=4, gpu_blocks=9)
    fill(host, "a", 8)
    while stores(host):
        host.copy()
        host.side.settle()
    block = host.pool.free_block_queue.fake_free_list_head.next_free_block
    assert block is not None
    block.block_hash, block.next_free_block = b"unseen" * 2, None
    assert stores(host) == ()


def test_after_a_reset_blocks_are_stored_again() -> None:
    host = lazy_host(ahead=8, gpu_blocks=2)
    fill(host, "a", 1)
    stores(host)
    host.copy()
    assert host.side.reset()
    for block in host.pool.blocks:  # vLLM resets its own cache first
        block.block_hash = None
    assert stores(host) == ()
    fill(host, "a", 1)
    host.step(copy=False)
    host.copy()
    assert host.stored() == set(keys_of("aa"))


def test_nothing_is_stored_before_the_length_of_hashes_is_known() -> None:
    host = lazy_host(ahead=8)
    host.pool.blocks[3].block_hash = b"other123" + bytes(4)
    assert stores(host) == ()
