from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.devices.cuda.plan import PIECE_BYTES, BatchedCopies, Split
from kvstow.layout import KVLayout, Region

_NO_SEAMS = np.zeros(0, np.int64)
_HOST = 1 << 40


def _split(pages: list[int], direct: list[bool], batch_bytes: int, gap: int = 0) -> Split:
    """Region `i` begins at `i << 32`."""
    layout = KVLayout(tuple(Region(f"{i}", 64, page, page + gap) for i, page in enumerate(pages)))
    return Split(layout, [i << 32 for i in range(len(pages))], direct, batch_bytes)


def _all(copies: BatchedCopies) -> list[tuple[int, int, int]]:
    device, host, size = (values.tolist() for values in copies.copies)
    return list(zip(device, host, size, strict=True))


def _array(*values: int) -> Any:
    return np.array(values, np.int64)


def _at(stride: int, *slots: int) -> Any:
    """The addresses of these slots."""
    return _HOST + stride * _array(*slots)


def test_neighbouring_slots_are_one_staged_copy() -> None:
    split = _split([100, 50], [False, False], 10_000)
    copies = split.staged_copies(_at(150, 3, 4, 5, 8), _NO_SEAMS)
    assert _all(copies) == [(0, _HOST + 450, 450), (450, _HOST + 1200, 150)]


def test_no_copy_crosses_a_seam() -> None:
    split = _split([150], [False], 10_000)
    copies = split.staged_copies(_at(150, 3, 4, 5, 6), _array(_HOST, _HOST + 750, _HOST + 9999))
    assert _all(copies) == [(0, _HOST + 450, 300), (300, _HOST + 750, 300)]


def test_no_copy_crosses_the_padding_between_slots() -> None:
    split = _split([150], [False], 10_000)
    copies = split.staged_copies(_at(152, 0, 1), _NO_SEAMS)
    assert _all(copies) == [(0, _HOST, 150), (150, _HOST + 152, 150)]


def test_neighbouring_pages_in_neighbouring_slots_are_one_direct_copy() -> None:
    split = _split([128], [True], 10_000)
    copies = split.direct_copies(_array(7, 8, 3), _at(128, 1, 2, 3), _NO_SEAMS)
    assert _all(copies) == [(7 * 128, _HOST + 128, 256), (3 * 128, _HOST + 384, 128)]


def test_a_batch_holds_whole_blocks_of_staged_pages() -> None:
    split = _split([100, 50], [False, False], 400)
    copies = split.staged_copies(_at(150, *range(5)), _NO_SEAMS)
    assert split.staging_bytes == 300
    assert split.num_batches(5) == len(copies.ends) == 3
    assert [copies.batch(number).size.tolist() for number in range(3)] == [[300], [300], [150]]
    assert [copies.batch(number).device.tolist() for number in range(3)] == [[0], [0], [0]]


def test_a_batch_holds_a_block_even_if_that_is_larger() -> None:
    split = _split([1000], [False], 1)
    assert (split.batch_blocks, split.staging_bytes, split.num_batches(3)) == (1, 1000, 3)


def test_a_block_of_large_direct_pages_is_more_than_one_batch() -> None:
    split = _split([100] * 6, [True] * 6, 250)
    copies = split.direct_copies(_array(5, 9), _at(600, 0, 1), _NO_SEAMS)
    sizes = [int(copies.batch(number).size.sum()) for number in range(split.num_batches(2))]
    assert sum(sizes) == 1200
    assert max(sizes) <= 300


def test_pages_larger_than_a_batch_are_a_batch_each() -> None:
    split = _split([1000, 1000], [True, True], 10)
    copies = split.direct_copies(_array(0, 3), _at(2000, 0, 5), _NO_SEAMS)
    assert split.num_batches(2) == 4
    assert copies.ends == (1, 2, 3, 4)


def test_an_op_of_no_blocks_has_no_batch() -> None:
    for direct in (True, False):
        split = _split([100], [direct], 400)
        assert split.num_batches(0) == 0
        assert split.staged_copies(_at(100), _NO_SEAMS).ends == ()
        assert split.direct_copies(_array(), _at(100), _NO_SEAMS).ends == ()


def test_pages_are_cut_into_pieces_that_cover_them() -> None:
    split = _split([PIECE_BYTES * 2 + 1, 5, 9], [False, True, False], 1, gap=3)
    assert split.pieces.tolist() == [
        (0, PIECE_BYTES * 2 + 4, 0, PIECE_BYTES),
        (PIECE_BYTES, PIECE_BYTES * 2 + 4, PIECE_BYTES, PIECE_BYTES),
        (PIECE_BYTES * 2, PIECE_BYTES * 2 + 4, PIECE_BYTES * 2, 1),
        (2 << 32, 12, PIECE_BYTES * 2 + 1, 9),
    ]


@given(data=st.data())
def test_every_byte_of_every_pair_is_copied_once_to_its_place(data: st.DataObject) -> None:
    pages = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    direct = data.draw(st.lists(st.booleans(), min_size=len(pages), max_size=len(pages)))
    gap = data.draw(st.integers(0, 2))
    split = _split(pages, direct, data.draw(st.integers(1, 300)), gap)
    slots = sorted(data.draw(st.sets(st.integers(0, 20), min_size=1)))
    blocks = data.draw(st.permutations(range(64)))[: len(slots)]
    slot_stride = sum(pages) + data.draw(st.integers(0, 2))
    seams = _array(*(_HOST + slot * slot_stride for slot in range(0, 20, 4)))

    staged = split.staged_copies(_at(slot_stride, *slots), seams)
    placed = {}
    for number in range(len(staged.ends)):
        for device, host, size in zip(*staged.batch(number), strict=True):
            assert device + size <= split.staging_bytes
            for byte in range(size):
                unit, offset = divmod(int(device) + byte, split.staged_bytes)
                block = blocks[number * split.batch_blocks + unit]
                for page, stride, start, length in split.pieces.tolist():
                    if start <= offset < start + length:
                        placed[int(host) + byte] = page + block * stride + offset - start
    straight = split.direct_copies(_array(*blocks), _at(slot_stride, *slots), seams)
    for device, host, size in _all(straight):
        placed |= {host + byte: device + byte for byte in range(size)}
    offsets = [0, *np.cumsum(pages).tolist()]
    assert placed == {
        _HOST + slot * slot_stride + offsets[i] + byte: (i << 32) + block * (page + gap) + byte
        for slot, block in zip(slots, blocks, strict=True)
        for i, page in enumerate(pages)
        for byte in range(page)
    }
    for copies in (staged, straight):
        for _, host, size in _all(copies):
            assert not any(host < seam < host + size for seam in seams.tolist())
        assert all(a <= b for a, b in pairwise(copies.ends))
