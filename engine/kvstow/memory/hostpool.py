"""The host pool of one rank of an embedded engine: memory of its own, populated and pinned in the background."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

from kvstow.config import PoolConfig
from kvstow.errors import InsufficientMemoryError
from kvstow.memory.chunks import Chunk, ChunkGrid, ChunkMemory
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.limits import Allowance, MemoryLimits, limits_of
from kvstow.memory.pinning import PopulateOnly, Registrar, pace_of
from kvstow.memory.region import HostRegion, bytes_by_node, prefer_node, round_up
from kvstow.memory.slotpool import Int64Array, SlotPool

_IDLE_POPULATORS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""How many threads populate while the host is idle. Beside a host that makes steps, one thread populates."""


class _RegionMemory(ChunkMemory):
    """Commits the chunks of a region."""

    def __init__(self, region: HostRegion, allowance: Allowance, numa_node: int | None) -> None:
        """Memory comes from `numa_node` if possible."""
        super().__init__()
        self._region, self._allowance = region, allowance
        if numa_node is not None:
            self.notice = prefer_node(region.address, region.num_bytes, numa_node)

    def commit(self, chunk: Chunk, *, host_is_idle: bool) -> None:
        start, end = self._pages(chunk)
        self._allowance.require(start, end)
        if start < end:
            threads = _IDLE_POPULATORS if host_is_idle else 1
            self._region.commit(start, end - start, plenty=self._allowance.is_plenty, threads=threads)
        self.resident_bytes = end

    def decommit(self, chunk: Chunk) -> None:
        start, end = self._pages(chunk)
        if start < end:
            self._region.decommit(start, end - start)
        self.resident_bytes = start

    def address_of(self, chunk: Chunk) -> int:
        return self._region.address + chunk.offset

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        start, end = self._pages(chunk)
        return bytes_by_node(self._region.address + start, end - start)

    def forget_limits(self) -> None:
        self._allowance.forget()

    def _pages(self, chunk: Chunk) -> tuple[int, int]:
        """Start and end of the chunk's memory, which is made of the pages of the region that begin in the chunk. A
        reserved huge page across its lower boundary belongs to the previous chunk."""
        page_bytes = self._region.page_bytes
        return round_up(chunk.offset, page_bytes), round_up(chunk.end_offset, page_bytes)


class HostPool(SlotPool):
    """A pool whose slots lie at `address + slot * slot_stride`, in address space that is reserved once. Chunks are
    committed from the bottom up, and given back from the top down to the target."""

    def __init__(
        self,
        config: PoolConfig,
        registrar: Registrar,
        *,
        limits: MemoryLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        numa_node: int | None = None,
    ) -> None:
        """Reserve address space, and use no memory yet. Memory will come from `numa_node` if possible. Raises
        `InsufficientMemoryError` if the machine or the cgroup has no room for `pool_bytes`, and `PinError` if there is
        no address space.
        """
        steps = HostSteps(clock)
        pace = pace_of(config, steps)
        limits = limits or limits_of(config.huge_pages)
        self._grid = ChunkGrid.of(config.slot_bytes, config.max_slots, pace.chunk_bytes)
        if shortage := limits.shortage(config.capacity_slots * self._grid.slot_stride):
            raise InsufficientMemoryError(f"the pool does not fit: {shortage.message}")
        self._region = HostRegion(self._grid.end_offset(config.max_slots), config.huge_pages)
        super().__init__(
            config.slot_bytes,
            config.max_slots,
            config.capacity_slots,
            _RegionMemory(self._region, Allowance(limits.shortage, clock), numa_node),
            registrar if config.lock else PopulateOnly(),
            steps,
            pace,
            cpu_clock=cpu_clock,
        )

    @property
    def address(self) -> int:
        """The address of slot 0."""
        return self._region.address

    @property
    def slot_stride(self) -> int:
        return self._grid.slot_stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self.address + slots * self.slot_stride

    def _next_chunk(self, covered: int) -> Chunk | None:
        return None if covered >= self._target else self._grid.next_chunk(covered, self._target, self._pace.chunk_bytes)

    def _chunks_left(self) -> int:
        return self._grid.count(self._covered(), self._target, self._pace.chunk_bytes)

    def _close_memory(self) -> None:
        self._memory.resident_bytes = 0
        self._region.close()
