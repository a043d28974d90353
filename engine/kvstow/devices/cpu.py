"""The CPU device: copies between arrays and a pool, without torch. Its pinning is `kvstow.memory.pinning`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow.devices.base import Fence, TicketState, checked, checked_slots
from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Part, Region
from kvstow.memory.slotpool import SlotPool
from kvstow.messages import LayerFigures

Rows: TypeAlias = npt.NDArray[np.uint8]
"""One row for each block or slot."""


class Run(NamedTuple):
    """Neighbouring blocks whose places are neighbours, too, so that one strided copy per region moves them."""

    block: int
    place: int
    length: int


def merge_runs(blocks: Sequence[int], places: Sequence[int], stride: int = 1) -> Iterator[Run]:
    """Merge the pairs (`blocks[i]`, `places[i]`), in their order, into as few runs as possible. Neighbouring places lie
    `stride` apart."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1 or places[end] != places[end - 1] + stride:
            yield Run(blocks[start], places[start], end - start)
            start = end


class CpuTicket:
    """A copy that runs inside the first `poll` after its fence is reached. Used by one thread."""

    def __init__(self, copy: Callable[[], None], after: Fence | None) -> None:
        self._copy, self._after = copy, after
        self._state = TicketState.PENDING
        self.error: BaseException | None = None
        self.seconds = 0.0

    def poll(self) -> TicketState:
        if self._state is not TicketState.PENDING:
            return self._state
        try:
            if self._after is None or self._after.query():
                started = time.perf_counter()
                self._copy()
                self.seconds = time.perf_counter() - started
                self._state = TicketState.DONE
        except Exception as error:  # noqa: BLE001 - poll never raises: the ticket carries the error
            self._state, self.error = TicketState.FAILED, error
        return self._state


class CpuLayeredLoad:
    """A `LayeredLoad` that copies a part when it is waited for: a computation that does not wait finds old bytes. It is
    also its own ticket."""

    def __init__(self, copies: Sequence[Callable[[], None]], after: Fence | None) -> None:
        self._copies, self._after = list(copies), after
        self._copied = 0
        self.error: BaseException | None = None
        self.seconds = 0.0

    @property
    def ticket(self) -> CpuLayeredLoad:
        return self

    def wait(self, part: int) -> None:
        if self._after is not None and not self._after.query():
            raise CopyError("the work before the load has not finished")
        began = time.perf_counter()
        while self._copied <= part:
            self._copies[self._copied]()
            self._copied += 1
        self.seconds += time.perf_counter() - began

    def poll(self) -> TicketState:
        return TicketState.DONE if self._copied == len(self._copies) else TicketState.PENDING


class CpuDevice:
    """Moves blocks between `tensors` and `pool`.

    `tensors[i]` is region `i` of `layout` as uint8 `[num_blocks, page_bytes]`, with dense rows and any stride between
    them. It is a numpy array, or a tensor of another library on the CPU with a method `numpy` that shares its memory,
    as torch's does. It is written and read in place; the caller keeps it alive. The pool is borrowed.
    """

    name, copies_alone = "cpu", False

    def __init__(
        self, pool: SlotPool, layout: KVLayout, tensors: Sequence[Any], parts: Sequence[Part] | None = None
    ) -> None:
        """`parts`: the parts that loads by layer copy one after the other; None if there are no such loads. Raises
        `ConfigError`, which names the region, for tensors that do not match the layout."""
        layout.require(pool.slot_bytes, len(tensors))
        arrays = [_array_of(region, tensor) for region, tensor in zip(layout.regions, tensors, strict=True)]
        self._pool, self._num_blocks = pool, layout.num_blocks
        self._pages = list(zip(arrays, layout.offsets, strict=True))
        self._whole = tuple(span for part in layout.parts for span in part)
        self._closed = False
        self._parts = tuple(parts or ())
        if parts is not None:
            layout.require_parts(parts)
        self.num_parts, self.layer_figures = len(self._parts), LayerFigures()

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> CpuTicket:
        return CpuTicket(lambda: self._move(self._whole, blocks, self._places(blocks, slots), is_store=True), after)

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> CpuTicket:
        return CpuTicket(lambda: self._move(self._whole, blocks, self._places(blocks, slots)), after)

    def load_layers(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> CpuLayeredLoad:
        places = self._places(blocks, slots)
        return CpuLayeredLoad([partial(self._move, part, blocks, places) for part in self._parts], after)

    def load_now(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> None:
        if after is not None and not after.query():
            raise CopyError("the work before the load has not finished")
        self._move(self._whole, blocks, self._places(blocks, slots))

    def _move(self, spans: Part, blocks: Sequence[int], places: Sequence[int], *, is_store: bool = False) -> None:
        """Copy these spans between the blocks and their slots, which are at the addresses `places`."""
        if self._closed:
            raise CopyError("the device is closed")
        stride = self._pool.slot_stride
        for run in merge_runs(blocks, places, stride):
            for number, start, size in spans:
                kv, offset = self._pages[number]
                pages = kv[run.block : run.block + run.length, start : start + size]
                rows = rows_at(run.place + offset + start, run.length, stride, pages)
                _copy_run(*((rows, pages) if is_store else (pages, rows)))

    def advance(self) -> None:
        """Does nothing, because copies run in `CpuTicket.poll`."""

    def close(self) -> None:
        """Let the copies that have not begun fail. None is under way, because the copy thread is the caller."""
        self._closed = True
        self._pages = []

    def _places(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Check the blocks and the slots, and return the addresses of the slots."""
        if self._closed:
            raise CopyError("the device is closed")
        checked("blocks", blocks, self._num_blocks)
        addresses: list[int] = self._pool.addresses(checked_slots(self._pool, slots, blocks)).tolist()
        return addresses


def _copy_run(target: Rows, source: Rows) -> None:
    target[:] = source


def _array_of(region: Region, tensor: Any) -> Rows:
    """The tensor as an array over its own memory, checked against the region."""
    if not isinstance(tensor, np.ndarray):
        if tensor.device.type != "cpu":
            raise ConfigError(f"region {region.name}", str(tensor.device), "the CPU, as for all regions")
        tensor = tensor.numpy()
    array: Rows = tensor
    region.require(str(array.dtype), array.shape, array.strides)
    return array


def rows_at(address: int, count: int, stride: int, like: Rows) -> Rows:
    """`count` rows of host memory from `address` on, `stride` bytes apart and as long as those of `like`."""
    page_bytes = like.shape[1]
    whole = 1 << ((count - 1) * stride + page_bytes).bit_length()  # a power of two: ctypes keeps a type for each size
    memory = (ctypes.c_uint8 * whole).from_address(address)
    return np.ndarray((count, page_bytes), np.uint8, memory, strides=(stride, 1))
