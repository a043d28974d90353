"""The memory of a pool's chunks: populated, registered, unregistered and given back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from kvstow.config import HugePages
from kvstow.memory.chunks import Chunk
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.limits import Allowance
from kvstow.memory.numa import bytes_by_node, prefer_node
from kvstow.memory.pacedregistrar import PacedRegistrar
from kvstow.memory.region import HostRegion, round_up

_POPULATORS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # threads while the host is idle; otherwise one
_NODE_STEP = 16 << 20  # bytes between two samples of the NUMA node: sampling holds the GIL


class ChunkMemory:
    """A region of address space, resident from its start to `resident_bytes`.

    Chunks are committed from the bottom up and decommitted from the top down. Each step either succeeds or is
    undone completely. Not locked: the pinning thread calls it, `register` any thread, and `close` follows the end of
    the pinning thread.
    """

    def __init__(
        self,
        num_bytes: int,
        huge_pages: HugePages,
        registrar: PacedRegistrar,
        allowance: Allowance,
        steps: HostSteps,
        *,
        clock: Callable[[], float],
        numa_node: int | None,
    ) -> None:
        """Reserves address space and uses no memory. Raises `PinError` if there is not even address space."""
        self.resident_bytes = 0
        self._registrar, self._allowance, self._steps = registrar, allowance, steps
        self._clock = clock
        self._region = HostRegion(num_bytes, huge_pages)
        self.numa_notice = None if numa_node is None else prefer_node(self.address, self._region.num_bytes, numa_node)
        """A sentence for people if memory cannot be bound to the node, else None."""

    @property
    def address(self) -> int:
        return self._region.address

    def commit(self, chunk: Chunk) -> None:
        """Populate the chunk. Raises `PinError` if the limits or the machine do not allow it."""
        self._registrar.prepare_thread()
        start, end = self._pages(chunk)
        self._allowance.require(start, end)
        if start < end:
            threads = _POPULATORS if self._steps.state(self._clock()) == "idle" else 1
            self._region.commit(start, end - start, plenty=self._allowance.is_plenty, threads=threads)
        self.resident_bytes = end

    def decommit(self, chunk: Chunk) -> None:
        """Give the chunk's memory back."""
        start, end = self._pages(chunk)
        if start < end:
            self._region.decommit(start, end - start)
        self.resident_bytes = start

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        """A committed chunk's bytes by NUMA node."""
        start, end = self._pages(chunk)
        return bytes_by_node(self.address + start, end - start, _NODE_STEP)

    def register(self, chunk: Chunk) -> None:
        """Pin a committed chunk, on the calling thread."""
        self._registrar.register(self.address + chunk.offset, chunk.num_bytes)

    def unregister(self, chunk: Chunk) -> None:
        """Undo `register`. Raises `PinError`; the chunk is then still pinned."""
        self._registrar.unregister(self.address + chunk.offset, chunk.num_bytes)

    def unregister_at_close(self, chunk: Chunk) -> None:
        """See `PacedRegistrar.unregister_at_close`."""
        what = f"slots {chunk.first_slot}-{chunk.end_slot - 1}"
        self._registrar.unregister_at_close(self.address + chunk.offset, chunk.num_bytes, what)

    def forget_allowance(self) -> None:
        """Check the limits again before the next chunk."""
        self._allowance.forget()

    def close(self) -> None:
        """Give back the memory and the address space; idempotent."""
        self.resident_bytes = 0
        self._region.close()

    def _pages(self, chunk: Chunk) -> tuple[int, int]:
        """Start and end of the chunk's own memory: the region's pages that begin in it. A reserved huge page across its
        lower boundary belongs to the previous chunk."""
        page_bytes = self._region.page_bytes
        return round_up(chunk.offset, page_bytes), round_up(chunk.end_offset, page_bytes)
