from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstow.config import PoolConfig
from kvstow.memory.chunks import ChunkGrid
from kvstow.memory.region import PAGE_BYTES


@given(
    slot_bytes=st.integers(1, 200_000),
    slots=st.integers(1, 3000),
    chunk_bytes=st.integers(1, 4 << 20),
    data=st.data(),
)
def test_chunks_tile_the_slots_in_whole_pages_whatever_the_sizes(
    slot_bytes: int, slots: int, chunk_bytes: int, data: st.DataObject
) -> None:
    grid = ChunkGrid.of(PoolConfig(slot_bytes, slot_bytes * slots, chunk_bytes=chunk_bytes))
    target = data.draw(st.integers(1, slots))
    covered = end = count = 0
    while covered < target:
        assert grid.count(covered, target) == grid.count(0, target) - count
        chunk = grid.next_chunk(covered, target)
        assert chunk.first_slot == covered
        assert chunk.offset == end == covered * grid.slot_stride
        assert chunk.offset % PAGE_BYTES == chunk.num_bytes % PAGE_BYTES == 0
        covered, end, count = chunk.end_slot, chunk.offset + chunk.num_bytes, count + 1
        assert covered * grid.slot_stride <= end <= grid.region_bytes
    assert grid.count(covered, target) == 0
    assert covered - target < grid.unit_slots


@given(slot_bytes=st.integers(1, 4 << 20))
def test_padding_stays_far_below_one_percent_at_the_default_chunk_size(slot_bytes: int) -> None:
    grid = ChunkGrid.of(PoolConfig(slot_bytes, slot_bytes))
    assert slot_bytes <= grid.slot_stride <= slot_bytes * 1.0002
    assert grid.chunk_slots * grid.slot_stride <= 64 << 20


def test_a_slot_of_whole_pages_is_never_padded_and_any_number_of_them_is_exact() -> None:
    grid = ChunkGrid.of(PoolConfig(5 * 4096, 1000 * 5 * 4096))
    assert grid.slot_stride == 5 * 4096
    assert grid.next_chunk(0, 7).end_slot == 7


def test_whole_chunks_end_at_huge_pages_where_slots_can() -> None:
    grid = ChunkGrid.of(PoolConfig(3 << 19, 3 << 29))
    assert grid.chunk_slots * grid.slot_stride % (2 << 20) == 0


def test_a_slot_larger_than_a_chunk_is_a_chunk_of_its_own() -> None:
    grid = ChunkGrid.of(PoolConfig(10_000, 50_000, chunk_bytes=1))
    assert grid.chunk_slots == 1
    assert grid.count(0, 5) == 5
