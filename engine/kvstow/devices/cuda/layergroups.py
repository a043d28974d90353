"""Loads by layer through the copy engine: groups of layers that lie together in a slot cross the link to a staging
buffer, and a kernel moves them on to their pages.

Copies of pieces below 256 KiB are far slower than the link, so a group takes at least 256 KiB of each slot. It takes
more if the load would have more than 4,096 copies, which the host needs about 2 ms to submit. The whole load is
submitted at once. Each copy waits, on the device, for the kernel that empties its buffer and for the copy before it. So
only the copies of the two buffers can run at a time, and copies of the step itself wait for no more than these.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate

import numpy as np

from kvstow.devices.base import Fence
from kvstow.devices.cuda.context import CudaContext, CudaFence, StagingBuffer, Timer, new_event
from kvstow.devices.cuda.copier import MAX_BLOCKS, PageKernels
from kvstow.devices.cuda.driver import Driver, Handle, Int64Array
from kvstow.devices.cuda.plan import PIECE, PIECE_BYTES
from kvstow.layout import KVLayout, Part

_CONTIGUOUS = 256 << 10
"""Bytes of a slot that a group has at least. Smaller copies reach 0.8 of the link's rate at best."""

_COPIES = 4096
"""Copies that a load has at most, unless its groups would be larger than a slot."""

_STAGING = 32 << 20
"""Bytes of a staging buffer, which holds at least one slot."""


class _Buffer:
    """A staging buffer. The event `copied` is reached when its bytes have arrived, and `freed` when a kernel has moved
    them on. A wait for an event is for its last record, so one event of each kind is enough."""

    def __init__(self, driver: Driver, num_bytes: int, undo: ExitStack) -> None:
        self.staging = StagingBuffer(driver, num_bytes, undo)
        self.copied, self.freed = (new_event(driver, undo, timing=False) for _ in range(2))


def slot_ends(layout: KVLayout, parts: Sequence[Part]) -> list[int] | None:
    """Where each part ends in a slot; None unless they follow one another there."""
    end, ends = 0, []
    for part in parts:
        for place, size in sorted((layout.offsets[number] + first, size) for number, first, size in part):
            if place != end:
                return None
            end += size
        ends.append(end)
    return ends


def group_ends(ends: Sequence[int], num_blocks: int) -> list[int]:
    """The end of each group, as a number of parts, for a load of `num_blocks` blocks."""
    total, start, groups = ends[-1], 0, []
    least = max(_CONTIGUOUS, -(-total * num_blocks // _COPIES))
    for number, end in enumerate(ends, 1):
        if number == len(ends) or min(end - start, total - end) >= least:
            groups.append(number)
            start = end
    return groups


def may_use_engine(layout: KVLayout, parts: Sequence[Part]) -> bool:
    """Whether a slot holds more than one group."""
    ends = slot_ends(layout, parts)
    return ends is not None and len(group_ends(ends, 1)) > 1


class LayerGroups:
    """Submits loads through two staging buffers. The host's thread uses it, and has made the context current. If
    `submit` raises, some of the load may be under way."""

    def __init__(
        self, context: CudaContext, layout: KVLayout, bases: Sequence[int], parts: Sequence[Part], undo: ExitStack
    ) -> None:
        """`parts`: those for which `may_use_engine` is true."""
        driver = self._driver = context.driver
        ends = slot_ends(layout, parts)
        assert ends is not None
        self._ends = ends
        rows = [_rows(layout, bases, part) for part in parts]
        self._rows = [0, *accumulate(len(row) for row in rows)]
        self._kernels = PageKernels(context, np.array([row for part in rows for row in part], PIECE), 0, undo)
        self.num_bytes = max(_STAGING, layout.slot_bytes)
        self.buffers = [_Buffer(driver, self.num_bytes, undo) for _ in range(2)]
        self._turn = 0

    @property
    def streams(self) -> list[Handle]:
        return [buffer.staging.link for buffer in self.buffers]

    def ends(self, num_blocks: int) -> list[int]:
        return group_ends(self._ends, num_blocks)

    def submit(
        self,
        events: Sequence[Handle],
        ends: Sequence[int],
        blocks: Int64Array,
        addresses: Int64Array,
        after: Fence | None,
        stream: Handle,
        timer: Timer,
    ) -> None:
        """Submit a load. Group `i` ends with part `ends[i]`, and `events[i]` is recorded when it is in its pages. The
        kernels that write the pages run on `stream`."""
        if isinstance(after, CudaFence):
            for link in self.streams:  # the copies wait, too, or their time would include the work before
                after.hold_back(link)
        first, start = 0, 0
        for event, last in zip(events, ends, strict=True):
            size = self._ends[last - 1] - start
            most = min(MAX_BLOCKS, self.num_bytes // size)
            for begin in range(0, len(blocks), most):
                some = slice(begin, begin + most)
                self._copy(addresses[some] + start, size, timer if not (start or begin) else None)
                buffer = self.buffers[self._turn]
                self._driver.wait_event(stream, buffer.copied)
                rows = range(self._rows[first], self._rows[last])
                # The pieces' offsets count from the start of the slot, and the buffer begins with the group.
                self._kernels.move(rows, buffer.staging.address - start, size, blocks[some], stream)
                self._driver.record_event(buffer.freed, stream)
                self._turn = 1 - self._turn
            self._driver.record_event(event, stream)
            first, start = last, start + size

    def _copy(self, addresses: Int64Array, size: int, timer: Timer | None) -> None:
        driver, buffer, other = self._driver, self.buffers[self._turn], self.buffers[1 - self._turn]
        link = buffer.staging.link
        driver.wait_event(link, buffer.freed)
        driver.wait_event(link, other.copied)
        if timer is not None:
            timer.start(link)
        count = len(addresses)
        target = buffer.staging.address + np.arange(count, dtype=np.int64) * size
        driver.copy(target, addresses, np.full(count, size, np.int64), "any", link)
        driver.record_event(buffer.copied, link)


def _rows(layout: KVLayout, bases: Sequence[int], part: Part) -> list[tuple[int, int, int, int]]:
    """The pieces of this part, of which a thread block moves one for each block."""
    rows: list[tuple[int, int, int, int]] = []
    for number, first, size in part:
        region, place = layout.regions[number], layout.offsets[number] + first
        base, stride = bases[number] + first, region.stride_bytes
        starts = range(0, size, PIECE_BYTES)
        rows += [(base + start, stride, place + start, min(PIECE_BYTES, size - start)) for start in starts]
    return rows
