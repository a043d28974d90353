"""Chunks: the units in which a pool's slots are populated and registered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd

from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots `first_slot` up to, but not including, `end_slot`: whole pages, `num_bytes` from `offset` in the region."""

    first_slot: int
    end_slot: int
    offset: int
    num_bytes: int

    @property
    def end_offset(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class PinnedChunks:
    """The pinned chunks: `last` on top of those `below`. Immutable: the pool creates the next value before it registers
    a chunk and assigns it afterwards, so no error can occur between registering a chunk and recording it.

    `numa_bytes`: the memory of all of them by NUMA node.
    """

    last: Chunk
    below: PinnedChunks | None
    count: int
    numa_bytes: Counter[int]

    @classmethod
    def on(cls, below: PinnedChunks | None, chunk: Chunk, numa_bytes: Counter[int]) -> PinnedChunks:
        if below is None:
            return cls(chunk, None, 1, numa_bytes)
        return cls(chunk, below, below.count + 1, below.numa_bytes + numa_bytes)


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Chunks of whole slots that share no page of `PAGE_BYTES`, so that each can be registered and given back alone.

    `slot_stride`: bytes from one slot to the next. It is `slot_bytes`, except for sizes that rarely meet a page
    boundary: those are padded, by at most 8 KiB per `chunk_bytes` or a page per slot. `unit_slots`: chunks end at a
    multiple of it, or at the end of the region; those short of the target at a multiple of `step_slots`."""

    slot_stride: int
    unit_slots: int
    step_slots: int
    max_slots: int

    @classmethod
    def of(cls, slot_bytes: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """A grid for chunks of about `chunk_bytes` or more."""
        return cls.of_stride(_stride(slot_bytes, chunk_bytes), max_slots, chunk_bytes)

    @classmethod
    def of_stride(cls, stride: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """As `of`, for slots without more padding. Where slots rarely meet a page boundary, chunks are larger."""
        unit = _slots_between_boundaries(stride, PAGE_BYTES)
        huge_unit = _slots_between_boundaries(stride, HUGE_PAGE_BYTES)
        return cls(stride, unit, huge_unit if huge_unit * stride <= chunk_bytes else unit, max_slots)

    def end_offset(self, target: int) -> int:
        """Total bytes of the chunks that hold `target` slots."""
        return round_up(self._end_slot(target) * self.slot_stride, PAGE_BYTES)

    def next_chunk(self, covered: int, target: int, num_bytes: int) -> Chunk:
        """The chunk after the first `covered` slots, for a pool of `target` slots (`covered` < `target`): at most
        `num_bytes`, or the smallest possible chunk."""
        end = min(self._next_step(covered, num_bytes), self._end_slot(target))
        offset = covered * self.slot_stride
        return Chunk(covered, end, offset, round_up(end * self.slot_stride, PAGE_BYTES) - offset)

    def count(self, covered: int, target: int, num_bytes: int) -> int:
        """The number of chunks of `num_bytes` from `covered` to `target` slots."""
        if covered >= target:
            return 0
        rest = max(0, target - self._next_step(covered, num_bytes))
        return 1 + -(-rest // self._chunk_slots(num_bytes))

    def _chunk_slots(self, num_bytes: int) -> int:
        return max(self.step_slots, num_bytes // self.slot_stride // self.step_slots * self.step_slots)

    def _next_step(self, covered: int, num_bytes: int) -> int:
        return (covered + self._chunk_slots(num_bytes)) // self.step_slots * self.step_slots

    def _end_slot(self, target: int) -> int:
        return min(round_up(target, self.unit_slots), self.max_slots)


def _slots_between_boundaries(stride: int, boundary: int) -> int:
    """The least number of slots whose bytes are a multiple of `boundary`."""
    return boundary // gcd(stride, boundary)


def _stride(slot_bytes: int, chunk_bytes: int) -> int:
    """The least padding that makes slots meet a page boundary at least once in `chunk_bytes`."""
    alignment = 1
    stride = slot_bytes
    while alignment < PAGE_BYTES and _slots_between_boundaries(stride, PAGE_BYTES) * stride > chunk_bytes:
        alignment *= 2
        stride = round_up(slot_bytes, alignment)
    return stride
