"""Which bytes an op copies, as arrays for a whole op, because Python work per page would cost more than the copy. This
module knows addresses and sizes, but no driver.

A copy is *direct* (between a page and its place in the slot) or *staged* (between a stretch of a slot and a staging
buffer, where a block's staged pages lie back to back as in the slot; kernels move them to and from the pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.devices.cuda.driver import Int64Array
from kvstow.layout import KVLayout

PIECE_BYTES = 32 << 10
"""Bytes that one thread block moves."""

PIECE = np.dtype([("page", np.uint64), ("stride", np.int64), ("offset", np.uint64), ("bytes", np.uint64)])
"""A piece of a page, as pages.cu declares it."""


class Stretch(NamedTuple):
    """Bytes that every block has: those of block `b` are at `device + b * stride`, and at `offset` in its slot."""

    device: int
    stride: int
    offset: int
    size: int


class Copies(NamedTuple):
    """Copy `i` moves `size[i]` bytes between `device[i]` and `host[i]`."""

    device: Int64Array
    host: Int64Array
    size: Int64Array


@dataclass(frozen=True, slots=True)
class BatchedCopies:
    """The copies of an op; those of batch `k` end at `ends[k]`."""

    copies: Copies
    ends: tuple[int, ...]

    def batch(self, number: int) -> Copies:
        part = slice(self.ends[number - 1] if number else 0, self.ends[number])
        return Copies(*(values[part] for values in self.copies))


class Split:
    """A layout divided into staged and direct regions, and the size of a batch.

    `bases[i]` is the address of region `i`; `direct[i]` says whether it is copied directly. A batch holds about
    `batch_bytes`, and at least one block (or one page if all regions are direct).
    """

    def __init__(self, layout: KVLayout, bases: Sequence[int], direct: Sequence[bool], batch_bytes: int) -> None:
        self.slot_bytes, self.batch_bytes = layout.slot_bytes, batch_bytes
        stretches = [
            Stretch(base, region.stride_bytes, offset, region.page_bytes)
            for base, region, offset in zip(bases, layout.regions, layout.offsets, strict=True)
        ]
        staged = [stretch for stretch, is_direct in zip(stretches, direct, strict=True) if not is_direct]
        self._direct = [stretch for stretch, is_direct in zip(stretches, direct, strict=True) if is_direct]
        self.staged_bytes = sum(stretch.size for stretch in staged)
        self._staged = _stretches_of_slot(staged, self.staged_bytes)
        self.pieces = _pieces(staged)
        self.batch_blocks = max(1, batch_bytes // self.slot_bytes)

    @property
    def has_direct(self) -> bool:
        return bool(self._direct)

    @property
    def staging_bytes(self) -> int:
        """Size of a staging buffer."""
        return self.batch_blocks * self.staged_bytes

    def num_batches(self, num_blocks: int) -> int:
        if self.staged_bytes:
            return -(-num_blocks // self.batch_blocks)
        return int(self._direct_batches(num_blocks)[-1]) + 1 if num_blocks else 0

    def staged_copies(self, slots: Int64Array, seams: Int64Array) -> BatchedCopies:
        """Copies between slots at these addresses and a staging buffer; device addresses count from its start."""
        units = np.arange(len(slots))
        batches = np.repeat(units // self.batch_blocks, len(self._staged))
        return _batched(self._staged, units % self.batch_blocks, slots, batches, seams)

    def direct_copies(self, blocks: Int64Array, slots: Int64Array, seams: Int64Array) -> BatchedCopies:
        """Copies between slots at these addresses and pages."""
        batches = self._direct_batches(len(blocks))
        return _batched(self._direct, blocks, slots, batches, seams)

    def _direct_batches(self, num_blocks: int) -> Int64Array:
        """The batch of each page that is copied directly. If all regions are direct, a batch need not hold whole
        blocks: blocks of large pages are far larger than a batch should be."""
        if self.staged_bytes:
            units: Int64Array = np.arange(num_blocks, dtype=np.int64)
            return np.repeat(units // self.batch_blocks, len(self._direct))
        sizes = np.tile(np.array([stretch.size for stretch in self._direct], np.int64), num_blocks)
        full = (np.cumsum(sizes) - sizes) // self.batch_bytes  # with gaps if a page is larger than a batch
        return np.concatenate((np.zeros(min(1, len(full)), np.int64), np.cumsum(full[1:] != full[:-1])))


def _batched(
    stretches: Sequence[Stretch], units: Int64Array, slots: Int64Array, batches: Int64Array, seams: Int64Array
) -> BatchedCopies:
    """Copies of `stretches` of all pairs (`units[i]`, slot at `slots[i]`), neighbours merged. `batches` is the batch of
    each copy before merging, ascending from 0 without gaps."""
    if not len(batches):
        empty = np.zeros(0, np.int64)
        return BatchedCopies(Copies(empty, empty, empty), ())
    table = np.array(stretches, np.int64)
    copies = Copies(
        (table[:, 0] + units[:, None] * table[:, 1]).ravel(),
        (slots[:, None] + table[:, 2]).ravel(),
        np.tile(table[:, 3], len(units)),
    )
    return _merged(copies, batches, seams)


def _merged(copies: Copies, batches: Int64Array, seams: Int64Array) -> BatchedCopies:
    """Merge copies that are adjacent on both sides, within a batch and never across a seam."""
    device, host, size = copies
    joined = (device[1:] == (device + size)[:-1]) & (host[1:] == (host + size)[:-1]) & (batches[1:] == batches[:-1])
    inner = np.flatnonzero(joined)
    joined[inner[_is_among(host[inner + 1], seams)]] = False
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.searchsorted(batches[first], np.arange(batches[-1] + 1), side="right")
    return BatchedCopies(Copies(device[first], host[first], np.add.reduceat(size, first)), tuple(ends.tolist()))


def _is_among(values: Int64Array, ascending: Int64Array) -> npt.NDArray[np.bool_]:
    place = np.searchsorted(ascending, values, side="right")
    found: npt.NDArray[np.bool_] = np.concatenate((np.full(1, -1), ascending))[place] == values
    return found


def _stretches_of_slot(staged: Sequence[Stretch], staged_bytes: int) -> list[Stretch]:
    """Adjacent staged pages of the slot as one stretch each, with their place in a staging buffer."""
    stretches: list[Stretch] = []
    for page in staged:
        last = stretches[-1] if stretches else None
        if last is not None and last.offset + last.size == page.offset:
            stretches[-1] = last._replace(size=last.size + page.size)
        else:
            packed = last.device + last.size if last is not None else 0
            stretches.append(Stretch(packed, staged_bytes, page.offset, page.size))
    return stretches


def _pieces(staged: Sequence[Stretch]) -> npt.NDArray[np.void]:
    """The staged pages, cut into pieces for one thread block each."""
    rows, packed = [], 0
    for page in staged:
        for start in range(0, page.size, PIECE_BYTES):
            size = min(PIECE_BYTES, page.size - start)
            rows.append((page.device + start, page.stride, packed + start, size))
        packed += page.size
    return np.array(rows, PIECE)
