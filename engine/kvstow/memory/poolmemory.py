"""What a pool needs from the memory of its chunks."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvstow.memory.chunks import Chunk


class PoolMemory(Protocol):
    """Where the bytes of chunks are. Each step either succeeds or is undone completely. Called by the pinning thread,
    except `register` and `commit`, which may run beside each other: `register` on the host's thread, and `commit` on
    one that populates, after a first time on the pinning thread. `close` follows the end of all. Chunks that follow
    each other may be committed and decommitted as one."""

    resident_bytes: int
    numa_notice: str | None

    def commit(self, chunk: Chunk) -> None:
        """Make the chunk's bytes present. Raises `PinError`."""

    def decommit(self, chunk: Chunk) -> None: ...

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        """A committed chunk's bytes by NUMA node."""

    def register(self, chunk: Chunk) -> None:
        """On the calling thread. Raises `PinError`; the chunk is then not pinned."""

    def unregister(self, chunk: Chunk) -> None:
        """Raises `PinError`; the chunk is then still pinned."""

    def unregister_at_close(self, chunk: Chunk) -> None:
        """Logs an error instead of raising it."""

    def close(self) -> None: ...
