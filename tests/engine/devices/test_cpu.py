from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import eventually

from kvstow.config import PoolConfig
from kvstow.devices.base import Device, Ticket, TicketState
from kvstow.devices.cpu import CpuDevice, Run, merge_runs
from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import PopulateOnly

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]


class Rank:
    """A KV cache with gaps between its rows, filled with random bytes, and a device over a pinned pool."""

    def __init__(
        self, pages: Sequence[int], gaps: Sequence[int], num_blocks: int, num_slots: int, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.storage = [
            torch.randint(0, 256, (num_blocks, page + gap), dtype=torch.uint8, generator=generator)
            for page, gap in zip(pages, gaps, strict=True)
        ]
        self.tensors = [memory[:, :page] for memory, page in zip(self.storage, pages, strict=True)]
        regions = [Region(f"{i}", num_blocks, t.shape[1], t.stride(0)) for i, t in enumerate(self.tensors)]
        layout = KVLayout(tuple(regions))
        size = layout.slot_bytes
        self.pool = HostPool(PoolConfig(size, size * num_slots, chunk_bytes=64 << 10, pause=0.0), PopulateOnly())
        self.device = CpuDevice(self.pool, layout, self.tensors)
        self.pool.start()

    def block(self, block: int) -> bytes:
        return b"".join(bytes(tensor[block].tolist()) for tensor in self.tensors)

    def slot(self, slot: int) -> bytes:
        return ctypes.string_at(self.pool.address + slot * self.pool.slot_stride, self.pool.slot_bytes)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        return self.device.launch_store(1, blocks, slots, None)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Ticket:
        return self.device.launch_load(2, blocks, slots, None)

    def close(self) -> None:
        self.device.close()
        self.pool.close()


@pytest.fixture
def make_rank() -> Any:
    ranks: list[Rank] = []

    def make(
        pages: Sequence[int] = (4096, 1000), gaps: Sequence[int] = (0, 24), blocks: int = 8, slots: int = 8
    ) -> Rank:
        ranks.append(Rank(pages, gaps, blocks, slots))
        eventually(lambda: ranks[-1].pool.pinned_slots == slots)
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def error_of(ticket: Ticket) -> str:
    assert ticket.poll() is TicketState.FAILED
    assert isinstance(ticket.error, CopyError)
    return str(ticket.error)


@settings(max_examples=60, deadline=None)
@given(
    regions=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=5),
    num_blocks=st.integers(1, 24),
    num_slots=st.integers(1, 24),
    data=st.data(),
)
def test_blocks_of_any_layout_survive_a_store_and_a_load(
    regions: list[tuple[int, int]], num_blocks: int, num_slots: int, data: st.DataObject
) -> None:
    pages, gaps = zip(*regions, strict=True)
    rank = Rank(pages, gaps, num_blocks, num_slots, seed=data.draw(st.integers(0, 1000)))
    try:
        while rank.pool.pinned_slots < num_slots:
            pass
        count = data.draw(st.integers(0, min(num_blocks, num_slots)))
        sources = data.draw(st.permutations(range(num_blocks)))[:count]
        slots = data.draw(st.permutations(range(num_slots)) | st.just(list(range(num_slots))))[:count]
        targets = data.draw(st.permutations(range(num_blocks)) | st.just(list(range(num_blocks))))[:count]
        stored = {slot: rank.block(block) for block, slot in zip(sources, slots, strict=True)}
        assert rank.store(sources, slots).poll() is TicketState.DONE
        for slot in range(num_slots):
            assert rank.slot(slot) == stored.get(slot, bytes(rank.pool.slot_bytes))

        expected = [memory.clone() for memory in rank.storage]
        for memory, page in zip(rank.storage, pages, strict=True):
            memory[:, :page] = 0
        for slot, block in zip(slots, targets, strict=True):
            assert slot in stored
            offset = 0
            for memory, page in zip(expected, pages, strict=True):
                memory[block, :page] = torch.tensor(list(stored[slot][offset : offset + page]), dtype=torch.uint8)
                offset += page
        for memory, page in zip(expected, pages, strict=True):
            untouched = sorted(set(range(num_blocks)) - set(targets))
            memory[untouched, :page] = 0
        assert rank.load(slots, targets).poll() is TicketState.DONE
        assert all(torch.equal(*pair) for pair in zip(rank.storage, expected, strict=True))
    finally:
        rank.close()


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_runs_keep_the_pairs_in_order_and_are_as_long_as_possible(pairs: list[tuple[int, int]]) -> None:
    runs = list(merge_runs([block for block, _ in pairs], [slot for _, slot in pairs]))
    assert [(run.block + i, run.place + i) for run in runs for i in range(run.length)] == pairs
    for left, right in pairwise(runs):
        assert (left.block + left.length, left.place + left.length) != (right.block, right.place)


def test_neighbours_are_merged_only_where_both_ascend_together() -> None:
    assert list(merge_runs([3, 4, 5, 9, 8], [7, 8, 9, 0, 1])) == [Run(3, 7, 3), Run(9, 0, 1), Run(8, 1, 1)]


def test_a_kv_cache_made_in_inference_mode_is_written_too(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    with torch.inference_mode():
        kv = torch.ones((4, 4096), dtype=torch.uint8)
    device: Device = CpuDevice(pool, KVLayout((Region("kv", 4, 4096, 4096),)), [kv])
    ticket = device.launch_load(1, [1, 3], [0, 5], None)
    assert ticket.poll() is TicketState.DONE
    assert kv.sum(dim=1).tolist() == [4096, 0, 4096, 0]


def test_seconds_are_those_of_the_copy_and_do_not_change_after_it(make_rank: Callable[[], Rank]) -> None:
    rank = make_rank()
    ticket = rank.store([0], [0])
    assert ticket.seconds == 0
    ticket.poll()
    seconds = ticket.seconds
    assert seconds > 0
    assert ticket.poll() is TicketState.DONE
    assert ticket.seconds == seconds


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([0, 8], [0, 1], "blocks 0 to 8; allowed: 0 to 7"),
        ([-1], [0], "blocks -1 to -1; allowed: 0 to 7"),
        ([0], [-1], "slots -1 to -1; allowed: 0 to 6, which are pinned"),
        ([0], [8], "slots 8 to 8; allowed: 0 to 6, which are pinned"),
        ([0, 1], [0], "2 blocks and 1 slots; allowed: as many of each"),
    ],
)
def test_an_op_out_of_range_fails_and_moves_nothing(
    make_rank: Callable[[], Rank], blocks: list[int], slots: list[int], message: str
) -> None:
    rank = make_rank()
    rank.pool.set_target(7)
    before = [memory.clone() for memory in rank.storage]
    assert message in error_of(rank.store(blocks, slots))
    error_of(rank.load(slots, blocks))
    assert all(torch.equal(*pair) for pair in zip(rank.storage, before, strict=True))
    assert rank.slot(0) == bytes(rank.pool.slot_bytes)


def test_a_fence_that_raises_fails_the_copy(make_rank: Callable[[], Rank]) -> None:
    class BrokenFence:
        def query(self) -> bool:
            raise OSError("the stream is gone")

    ticket = make_rank().device.launch_store(1, [0], [0], BrokenFence())
    assert ticket.poll() is TicketState.FAILED
    assert str(ticket.error) == "the stream is gone"


def test_an_empty_op_is_done_at_once(make_rank: Callable[[], Rank]) -> None:
    assert make_rank().store([], []).poll() is TicketState.DONE


def test_a_closed_device_or_pool_fails_copies_instead_of_crashing(make_rank: Callable[[], Rank]) -> None:
    rank = make_rank()
    rank.pool.close()
    assert error_of(rank.store([0], [0])) == "slots 0 to 0; allowed: none"
    waiting = rank.store([0], [0])
    rank.device.close()
    rank.device.close()
    assert error_of(waiting) == "the device is closed"


def test_tensors_that_do_not_fit_the_layout_are_refused_by_name(make_pool: MakePool) -> None:
    pool = make_pool()
    layout = KVLayout((Region("k", 4, 1024, 1024), Region("v", 4, 3072, 3072)))
    k, v = torch.zeros((4, 1024), dtype=torch.uint8), torch.zeros((4, 3072), dtype=torch.uint8)
    cases: list[tuple[KVLayout, list[torch.Tensor], str]] = [
        (KVLayout(layout.regions[:1]), [k], "slot_bytes is 4096; allowed: 1024"),
        (layout, [k], "tensors is 1; allowed: 2"),
        (layout, [k.to(torch.int8), v], "region k is 'int8'; allowed: uint8"),
        (layout, [k[:3], v], "region k is (3, 1024); allowed: shape (4, 1024)"),
        (layout, [k, torch.zeros((3072, 4), dtype=torch.uint8).T], "region v is (1, 4); allowed: rows without gaps"),
        (layout, [k, torch.zeros((4, 4000), dtype=torch.uint8)[:, :3072]], "region v is 4000; allowed: a row stride"),
    ]
    for wrong_layout, tensors, message in cases:
        with pytest.raises(ConfigError) as caught:
            CpuDevice(pool, wrong_layout, tensors)
        assert message in str(caught.value)


def test_numpy_arrays_are_a_kv_cache_too(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    kv = np.arange(4 * 4100, dtype=np.uint8).reshape(4, 4100)[:, :4096]
    before = kv.copy()
    device = CpuDevice(pool, KVLayout((Region("kv", 4, 4096, 4100),)), [kv])
    assert device.launch_store(1, [1, 2], [5, 6], None).poll() is TicketState.DONE
    assert device.launch_load(2, [0, 3], [6, 5], None).poll() is TicketState.DONE
    assert [(kv[to] == before[source]).all() for to, source in ((0, 2), (1, 1), (2, 2), (3, 1))] == [True] * 4


def test_a_tensor_of_another_device_is_refused_by_name(make_pool: MakePool) -> None:
    kv = torch.zeros((4, 4096), dtype=torch.uint8, device="meta")
    with pytest.raises(ConfigError, match="region kv is 'meta'; allowed: the CPU"):
        CpuDevice(make_pool(), KVLayout((Region("kv", 4, 4096, 4096),)), [kv])
