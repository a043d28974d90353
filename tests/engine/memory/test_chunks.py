from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstow.memory.chunks import ChunkGrid
from kvstow.memory.region import PAGE_BYTES


@given(
    slot_bytes=st.integers(1, 200_000),
    slots=st.integers(1, 3000),
    chunk_bytes=st.integers(1, 4 << 20),
    data=st.data(),
)
def test_chunks_tile_the_slots_in_whole_pages(
    slot_bytes: int, slots: int, chunk_bytes: int, data: st.DataObject
) -> None:
    grid = ChunkGrid.of(slot_bytes, slots, chunk_bytes)
    target = data.draw(st.integers(1, slots))
    covered = end = count = 0
    while covered < target:
        assert grid.count(covered, target, chunk_bytes) == grid.count(0, target, chunk_bytes) - count
        chunk = grid.next_chunk(covered, target, chunk_bytes)
        assert chunk.first_slot == covered
        assert chunk.offset == end == covered * grid.slot_stride
        assert chunk.offset % PAGE_BYTES == chunk.num_bytes % PAGE_BYTES == 0
        covered, end, count = chunk.end_slot, chunk.offset + chunk.num_bytes, count + 1
        assert covered * grid.slot_stride <= end <= grid.end_offset(slots)
    assert grid.count(covered, target, chunk_bytes) == 0
    assert grid.end_offset(target) == end
    assert covered - target < grid.unit_slots


@given(
    slot_bytes=st.integers(1, 200_000),
    slots=st.integers(1, 3000),
    sizes=st.lists(st.integers(1, 4 << 20), min_size=1),
)
def test_chunks_may_differ_in_size(slot_bytes: int, slots: int, sizes: list[int]) -> None:
    grid = ChunkGrid.of(slot_bytes, slots, 1 << 18)
    covered = end = 0
    for size in sizes:
        if covered < slots:
            chunk = grid.next_chunk(covered, slots, size)
            assert (chunk.first_slot, chunk.offset) == (covered, end)
            assert chunk.num_bytes % PAGE_BYTES == 0
            assert chunk.end_slot - covered <= max(size // grid.slot_stride, grid.step_slots)
            covered, end = chunk.end_slot, chunk.end_offset


@given(slot_bytes=st.integers(1, 4 << 20))
def test_padding_stays_far_below_one_percent(slot_bytes: int) -> None:
    grid = ChunkGrid.of(slot_bytes, 1 << 20, 8 << 20)
    assert slot_bytes <= grid.slot_stride <= slot_bytes * 1.0011
    assert grid.next_chunk(0, 1 << 20, 8 << 20).num_bytes <= 8 << 20


def test_a_slot_of_whole_pages_is_never_padded_and_any_number_of_them_is_exact() -> None:
    grid = ChunkGrid.of(5 * 4096, 1000, 64 << 20)
    assert grid.slot_stride == 5 * 4096
    assert grid.next_chunk(0, 7, 64 << 20).end_slot == 7


def test_whole_chunks_end_at_huge_pages_where_slots_can() -> None:
    grid = ChunkGrid.of(3 << 19, 1024, 64 << 20)
    assert grid.next_chunk(0, 1024, 64 << 20).num_bytes % (2 << 20) == 0


def test_a_slot_larger_than_a_chunk_is_a_chunk_of_its_own() -> None:
    grid = ChunkGrid.of(10_000, 5, 1)
    assert grid.next_chunk(0, 5, 1).end_slot == 1
    assert grid.count(0, 5, 1) == 5
