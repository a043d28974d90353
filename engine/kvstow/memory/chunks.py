"""How a pool's slots are cut into the chunks that are made ready one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kvstow.config import PoolConfig
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class Chunk:
    """The slots from `first_slot` to before `end_slot`, in whole pages `offset`, `num_bytes` of the region."""

    first_slot: int
    end_slot: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Chunks of whole slots that share no page, so that each can be registered and given back alone.

    `slot_stride`: distance of two slots. It is `slot_bytes`, but for sizes that meet a page boundary too seldom;
    those are padded, by at most 8 KiB per `chunk_bytes` or a page per slot. `unit_slots`: chunks end at a multiple
    of it, or at the end of the region. `chunk_slots`: slots of a whole chunk.
    """

    slot_stride: int
    unit_slots: int
    chunk_slots: int
    max_slots: int

    @classmethod
    def of(cls, config: PoolConfig) -> ChunkGrid:
        stride = _stride(config.slot_bytes, config.chunk_bytes)
        unit = _slots_between_boundaries(stride, PAGE_BYTES)
        huge_unit = _slots_between_boundaries(stride, HUGE_PAGE_BYTES)
        step = huge_unit if huge_unit * stride <= config.chunk_bytes else unit
        chunk = max(step, config.chunk_bytes // stride // step * step)
        return cls(stride, unit, chunk, config.max_slots)

    @property
    def region_bytes(self) -> int:
        return round_up(self.max_slots * self.slot_stride, PAGE_BYTES)

    def next_chunk(self, covered: int, target: int) -> Chunk:
        """The chunk after the first `covered` slots, on the way to `target` slots (`covered` < `target`)."""
        whole = (covered // self.chunk_slots + 1) * self.chunk_slots
        end = min(whole, round_up(target, self.unit_slots), self.max_slots)
        offset = covered * self.slot_stride
        return Chunk(covered, end, offset, round_up(end * self.slot_stride, PAGE_BYTES) - offset)

    def count(self, covered: int, target: int) -> int:
        """How many chunks lie between `covered` and `target` slots."""
        if covered >= target:
            return 0
        return (target - 1) // self.chunk_slots - covered // self.chunk_slots + 1


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
