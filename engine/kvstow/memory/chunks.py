"""Chunks: the units in which a pool's slots are populated and registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from math import gcd

from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, bytes_by_node, round_up


@dataclass(frozen=True, slots=True)
class Chunk:
    """The slots from `first_slot` up to, but not including, `end_slot`. They fill whole pages: `num_bytes` from
    `offset` on in the region."""

    first_slot: int
    end_slot: int
    offset: int
    num_bytes: int

    @property
    def end_offset(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class PinnedChunks:
    """A stack of pinned chunks: `last` lies on top of `below`. `numa_bytes` is the memory of all chunks on each NUMA
    node.

    Immutable. The pool makes the next value before it registers a chunk, and assigns it afterwards. So no error can
    occur between registering a chunk and recording it.
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


class ChunkMemory(ABC):
    """The memory of a pool, which is committed and given back in chunks.

    Each call succeeds, or is undone completely. The pinning thread makes the calls, one at a time. Another thread may
    call `commit` instead, but not before the pinning thread has called it once.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        """How many bytes of memory the committed chunks have."""
        self.notice: str | None = None
        """A sentence for operators if the memory is not on the NUMA node that it should be on."""

    @abstractmethod
    def commit(self, chunk: Chunk, *, host_is_idle: bool) -> None:
        """Back the chunk's bytes with memory. Several chunks that follow each other in memory may be committed as one.
        While the host is idle, this may use more threads. Raises `PinError`."""

    @abstractmethod
    def decommit(self, chunk: Chunk) -> None:
        """Give the chunk's memory back."""

    @abstractmethod
    def address_of(self, chunk: Chunk) -> int:
        """Return the address of the chunk's first byte."""

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        """Count a committed chunk's bytes on each NUMA node."""
        return bytes_by_node(self.address_of(chunk), chunk.num_bytes)

    @abstractmethod
    def forget_limits(self) -> None:
        """Read the limits on memory again before the next chunk, because a chunk has failed."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Divides slots into chunks that share no page of `PAGE_BYTES`, so that each chunk can be registered and given back
    alone.

    `slot_stride` is the number of bytes from one slot to the next. It equals `slot_bytes`, except for sizes that rarely
    meet a page boundary: those get padding, at most 8 KiB per `chunk_bytes` or a page per slot. Each chunk ends at a
    multiple of `unit_slots`, or at the end of the region. A chunk that ends before the target ends at a multiple of
    `step_slots`.
    """

    slot_stride: int
    unit_slots: int
    step_slots: int
    max_slots: int

    @classmethod
    def of(cls, slot_bytes: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """Make a grid for chunks of about `chunk_bytes` or more."""
        return cls.of_stride(_stride(slot_bytes, chunk_bytes), max_slots, chunk_bytes)

    @classmethod
    def of_stride(cls, stride: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """Make a grid for slots that get no further padding. Where slots rarely meet a page boundary, chunks are
        larger than `chunk_bytes`."""
        unit = _slots_between_boundaries(stride, PAGE_BYTES)
        huge_unit = _slots_between_boundaries(stride, HUGE_PAGE_BYTES)
        return cls(stride, unit, huge_unit if huge_unit * stride <= chunk_bytes else unit, max_slots)

    def end_offset(self, target: int) -> int:
        """Return the total size of the chunks that hold `target` slots, in bytes."""
        return round_up(self._end_slot(target) * self.slot_stride, PAGE_BYTES)

    def next_chunk(self, covered: int, target: int, num_bytes: int) -> Chunk:
        """Return the chunk after the first `covered` slots of a pool with `target` slots (`covered` < `target`). It has
        at most `num_bytes`, or the smallest possible size."""
        end = min(self._next_step(covered, num_bytes), self._end_slot(target))
        offset = covered * self.slot_stride
        return Chunk(covered, end, offset, round_up(end * self.slot_stride, PAGE_BYTES) - offset)

    def count(self, covered: int, target: int, num_bytes: int) -> int:
        """Return how many chunks of `num_bytes` lead from `covered` to `target` slots."""
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
    """Return the least number of slots whose total size is a multiple of `boundary`."""
    return boundary // gcd(stride, boundary)


def _stride(slot_bytes: int, chunk_bytes: int) -> int:
    """Return `slot_bytes` with the least padding that makes slots meet a page boundary once in `chunk_bytes`."""
    alignment = 1
    stride = slot_bytes
    while alignment < PAGE_BYTES and _slots_between_boundaries(stride, PAGE_BYTES) * stride > chunk_bytes:
        alignment *= 2
        stride = round_up(slot_bytes, alignment)
    return stride
