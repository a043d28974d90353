"""One rank's host pool: slots in memory of its own, populated and pinned in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvstow.config import PoolConfig
from kvstow.errors import InsufficientMemoryError
from kvstow.memory.chunkmemory import ChunkMemory
from kvstow.memory.chunks import Chunk, ChunkGrid
from kvstow.memory.limits import Allowance, MemoryLimits, limits_of
from kvstow.memory.pace import pace_of
from kvstow.memory.pinning import PopulateOnly, Registrar
from kvstow.memory.slotpool import Int64Array, SlotPool


class HostPool(SlotPool):
    """Slots at `address + slot * slot_stride`, in address space that is reserved once. Memory above the target is given
    back."""

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
        """Reserve address space; uses no memory yet. Memory comes from `numa_node` if possible. Raises
        `InsufficientMemoryError` if `pool_bytes` cannot fit, `PinError` if there is not even address space.
        """
        super().__init__(
            config.slot_bytes,
            config.max_slots,
            config.capacity_slots,
            registrar if config.lock else PopulateOnly(),
            partial(pace_of, config),
            clock=clock,
            cpu_clock=cpu_clock,
        )
        limits = limits or limits_of(config.huge_pages)
        self._grid = ChunkGrid.of(config.slot_bytes, config.max_slots, self._pace.chunk_bytes)
        if shortage := limits.shortage(config.capacity_slots * self._grid.slot_stride):
            raise InsufficientMemoryError(f"the pool does not fit: {shortage.message}")
        self._allowance = Allowance(limits.shortage, clock)
        self._memory: ChunkMemory = ChunkMemory(
            self._grid.region_bytes,
            config.huge_pages,
            self._paced,
            self._allowance,
            self.steps,
            clock=clock,
            numa_node=numa_node,
        )

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def slot_stride(self) -> int:
        return self._grid.slot_stride

    def addresses(self, slots: Int64Array) -> Int64Array:
        return self.address + slots * self.slot_stride

    def _next_chunk(self, covered: int) -> Chunk | None:
        return None if covered >= self._target else self._grid.next_chunk(covered, self._target, self._pace.chunk_bytes)

    def _chunks_left(self) -> int:
        return self._grid.count(self._covered(), self._target, self._pace.chunk_bytes)

    def _forget_limits(self) -> None:
        self._allowance.forget()
