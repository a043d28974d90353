"""Where the objects of one batch lie while Mooncake moves them: each is a slot and its header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstow_service.tiers.mooncake.childmemory import ChildMemory, Registered
from kvstow_service.tiers.mooncake.childmessages import SlotPart
from kvstow_service.tiers.objectheader import HEADER_BYTES, find_mismatch, pack_header

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

STAGED_BYTES = 256 << 10
"""Slots up to this size are copied, which takes 10 us for 256 KiB. With TCP, Mooncake moves each piece of an object by
a request of its own, and one for a header takes 30 us."""


class Pieces(NamedTuple):
    """For each object, the addresses and sizes of its pieces."""

    addresses: list[list[int]]
    sizes: list[list[int]]


class ObjectBuffers:
    """Room for the headers of one batch, and for its small slots. Not locked: one thread."""

    def __init__(self, store: MooncakeDistributedStore, memory: ChildMemory, num_objects: int) -> None:
        """Takes no memory until a batch uses it. Raises `RegistrationError`."""
        self._memory = memory
        self._headers = Registered(store, -1, num_objects * HEADER_BYTES)
        self._staging = Registered(store, -1, num_objects * (STAGED_BYTES + HEADER_BYTES))

    def fill(self, objects: Sequence[SlotPart]) -> Pieces:
        """The objects, from their slots. Raises `LookupError` for an address that is not registered."""
        pieces = self.place(objects)
        for index, part in enumerate(objects):
            slot = self._memory.view(part)
            header = pack_header(part.fingerprint, part.name, slot)
            if _is_staged(part):
                start = _start(index)
                self._staging.view[start : start + part.num_bytes] = slot
                self._staging.view[start + part.num_bytes : start + part.num_bytes + HEADER_BYTES] = header
            else:
                self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES] = header
        return pieces

    def place(self, objects: Sequence[SlotPart]) -> Pieces:
        """Where the objects will be. Raises as `fill`, before any is touched."""
        slots = [self._memory.address(part) for part in objects]
        pieces = Pieces([], [])
        for index, (part, slot) in enumerate(zip(objects, slots, strict=True)):
            if _is_staged(part):
                pieces.addresses.append([self._staging.address + _start(index)])
                pieces.sizes.append([part.num_bytes + HEADER_BYTES])
            else:
                pieces.addresses.append([slot, self._headers.address + index * HEADER_BYTES])
                pieces.sizes.append([part.num_bytes, HEADER_BYTES])
        return pieces

    def take(self, index: int, part: SlotPart) -> str | None:
        """Verify the object of a batch that was placed, and have it in its slot. What is wrong with it; None if nothing
        is."""
        slot = self._memory.view(part)
        if not _is_staged(part):
            header = bytes(self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
            return find_mismatch(header, part.fingerprint, part.name, slot)
        start, end = _start(index), _start(index) + part.num_bytes
        staged = self._staging.view[start:end]
        header = bytes(self._staging.view[end : end + HEADER_BYTES])
        mismatch = find_mismatch(header, part.fingerprint, part.name, staged)
        if mismatch is None:
            slot[:] = staged
        return mismatch


def _is_staged(part: SlotPart) -> bool:
    return part.num_bytes <= STAGED_BYTES


def _start(index: int) -> int:
    return index * (STAGED_BYTES + HEADER_BYTES)
