"""The extents of one rank of a pool, as far as the node's own transfers may use them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from kvstow.attach.extentcalls import ExtentGrant
from kvstow.errors import CopyError
from kvstow.tier.store import MemoryRange, TransferClient


class _Mapped(NamedTuple):
    grant: ExtentGrant
    map: mmap.mmap
    memory: MemoryRange


class MappedRank:
    """The `SlotMemory` of one rank, made of extents that come and go. One thread changes it, and any may read.

    This process maps the extents, too, as some clients of stores copy in it; it touches no byte of them itself, so
    they do not count in its resident size. An extent goes only when no block of its slots is left in the pool and no op
    uses them, so nothing has to be held here.
    """

    def __init__(self, slot_bytes: int, client: TransferClient) -> None:
        """The client stays the caller's."""
        self.slot_bytes = slot_bytes
        self._client = client
        self._stride = slot_bytes
        self._extents: tuple[_Mapped, ...] = ()
        """In the order of their slots."""

    def add(self, grant: ExtentGrant, fd: int, slot_stride: int) -> None:
        """An extent that is populated. The caller keeps the descriptor. Raises `OSError` or `KvstowError`."""
        mapped = mmap.mmap(fd, grant.num_bytes)
        mapped.madvise(mmap.MADV_DONTFORK)
        memory = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), grant.num_bytes, fd)
        try:
            self._client.add_memory(memory)
        except BaseException:
            mapped.close()
            raise
        self._stride = slot_stride
        one = _Mapped(grant, mapped, memory)
        self._extents = tuple(sorted((*self._extents, one), key=lambda extent: extent.grant.first_slot))

    def remove(self, extent_id: int) -> None:
        """No process maps the extent for the transfers any more when this returns; one that was not added is
        ignored."""
        gone = [one for one in self._extents if one.grant.extent_id == extent_id]
        self._extents = tuple(one for one in self._extents if one not in gone)
        for one in gone:
            self._client.remove_memory(one.memory)
            one.map.close()

    def clear(self) -> None:
        """`remove` all of them. After an error the others are removed, too; then it is raised."""
        with ExitStack() as stack:
            for one in self._extents:
                stack.callback(self.remove, one.grant.extent_id)

    def addresses(self, slots: Any) -> Any:
        """Raises `CopyError` for a slot that is not mapped."""
        extents = self._extents
        firsts = np.array([one.grant.first_slot for one in extents], np.int64)
        ends = np.array([one.grant.first_slot + one.grant.num_slots for one in extents], np.int64)
        bases = np.array([one.memory.address for one in extents], np.int64)
        index = np.searchsorted(firsts, slots, side="right") - 1
        if not len(extents) or (index < 0).any() or (slots >= ends[index]).any():
            raise CopyError("some of the slots are in memory that the node's transfers do not have")
        return bases[index] + (slots - firsts[index]) * self._stride
