"""Loads by layer: they copy one layer after the other to its pages, and the host's computation waits for each layer on
the device.

There are two ways, and a load takes the one that is faster on this host (`layerways`). A kernel reads slots over the
link straight into the pages, without a staging buffer. Its warps take pieces of 4 KiB, so a few thread blocks fill the
link for pages of any size, and leave the other multiprocessors to the computation (`bench.gpu.layers`). Or the copy
engine brings groups of layers through two staging buffers (`layergroups`), if a slot holds more than one group.

A load that fails leaves no work behind: it fails before the device has any of it, or waits for what the device has.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate
from math import sqrt

import numpy as np

from kvstow.devices.base import Fence, TicketState
from kvstow.devices.cuda.context import CudaContext, CudaFence, Timer, new_event, new_stream
from kvstow.devices.cuda.copier import copy_to_device, twice
from kvstow.devices.cuda.driver import Driver, DriverError, Handle, Int64Array
from kvstow.devices.cuda.layergroups import LayerGroups, may_use_engine
from kvstow.devices.cuda.layertrial import PIECE_BYTES, PLACE, Fetch, LayerTrial
from kvstow.devices.cuda.layerways import WayRates
from kvstow.devices.cuda.plan import PIECE
from kvstow.errors import CopyError
from kvstow.layout import KVLayout, Part
from kvstow.messages import LayerFigures, LayerWay

_LAUNCH_BYTES = 5 << 19
"""Bytes that the link moves in 50 us, the time that a launch and the wait for it cost the host."""

_AT_A_TIME = 4
"""Loads that may be under way. A host is at most two steps ahead of the device, with one load in each."""


class _Buffers:
    """The places of one load, in memory of the host and of the device, and the event after which nothing reads them."""

    def __init__(self, driver: Driver, num_blocks: int, undo: ExitStack) -> None:
        num_bytes = num_blocks * PLACE.itemsize
        self.host = driver.allocate_host(num_bytes)
        undo.callback(driver.free_host, self.host)
        self.device = driver.allocate(num_bytes)
        undo.callback(driver.free, self.device)
        self.places = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.host)).view(PLACE)
        self.timer, self.finished = Timer(driver, undo), new_event(driver, undo, timing=False)
        self.way: LayerWay = "kernel"
        self.num_bytes = 0


class CudaLayeredLoad:
    """A `LayeredLoad`: `events[launches[part]]` is reached when the part is in its blocks. Like a fence, it owns its
    events and gives them back when it is collected. It is also its own ticket: the thread that drives the device writes
    `seconds` and `is_done`."""

    error: BaseException | None = None  # always: a load that cannot be submitted raises instead

    def __init__(self, context: CudaContext, compute: Callable[[], Handle]) -> None:
        self._context, self._compute = context, compute
        self.seconds, self.is_done = 0.0, False
        self.events: list[Handle] = []
        self.launches: list[int] = []
        self._waited: dict[Handle, int] = {}
        """The last launch that each stream waits for. Launches end in their order, so the last one is enough."""

    @property
    def ticket(self) -> CudaLayeredLoad:
        return self

    def poll(self) -> TicketState:
        return TicketState.DONE if self.is_done else TicketState.PENDING

    def wait(self, part: int) -> None:
        stream, launch = self._compute(), self.launches[part]
        if self._waited.get(stream, -1) < launch:
            with self._context.current():
                self._context.driver.wait_event(stream, self.events[launch])
            self._waited[stream] = launch

    def __del__(self) -> None:
        for event in getattr(self, "events", ()):
            self._context.give_back(event)


class LayerLoader:
    """`load` belongs to the host's thread; `advance` and `drain` to the one that drives the device. `compute` returns
    the calling thread's compute stream. The caller has made the context current."""

    def __init__(
        self,
        context: CudaContext,
        layout: KVLayout,
        bases: Sequence[int],
        parts: Sequence[Part],
        compute: Callable[[], Handle],
        undo: ExitStack,
    ) -> None:
        driver = self._driver = context.driver
        self._context, self._compute = context, compute
        self._fetch = Fetch(context, undo)
        rows = [_pieces(layout, bases, part) for part in parts]
        self._table = copy_to_device(driver, np.concatenate(rows), undo)
        self._starts = [0, *accumulate(len(row) for row in rows)]
        self._part_bytes = [sum(span.size for span in part) for part in parts]
        self._stream = new_stream(driver, undo, urgent=True)
        self._buffers = deque(_Buffers(driver, layout.num_blocks, undo) for _ in range(_AT_A_TIME))
        self._flying: deque[tuple[_Buffers, CudaLayeredLoad]] = deque()
        self._ways = WayRates()
        self._groups: LayerGroups | None = None
        self._trial: LayerTrial | None = None
        # The driver loads code at its first launch, and waits for all kernels that run by then: so launch it now.
        self._fetch.launch(self._table, 0, 0, 0, self._stream)
        undo.callback(twice, partial(driver.synchronize, self._stream))
        if may_use_engine(layout, parts):
            self._groups = LayerGroups(context, layout, bases, parts, undo)
            self._trial = LayerTrial(context, self._fetch, self._groups, self._stream, undo)
            self._ways.trying()
            self._ways.tried(*self._trial.first())
        undo.callback(self._wait)  # last, so that it runs first: it waits for all streams

    def load(self, blocks: Int64Array, addresses: Int64Array, after: Fence | None) -> CudaLayeredLoad:
        """Load from the slots at these addresses. See `LayerDevice.load_layers`."""
        if after is not None and not isinstance(after, CudaFence) and not after.query():
            raise CopyError("the work before the load has not finished, and is none of CUDA's")
        load = CudaLayeredLoad(self._context, self._compute)
        groups = self._groups if self._ways.way == "engine" else None
        ends = self._launch_ends(len(blocks)) if groups is None else groups.ends(len(blocks))
        load.launches = [number for number, (first, end) in enumerate(_pairs(ends)) for _ in range(first, end)]
        for _ in ends:  # one by one, so that the load returns each, whatever fails
            load.events.append(self._context.take_event())
        try:
            buffers = self._buffers.popleft()
        except IndexError:
            raise CopyError(f"{_AT_A_TIME} loads by layer are under way; no more are taken") from None
        try:
            buffers.way, buffers.num_bytes = self._ways.way, len(blocks) * sum(self._part_bytes)
            if groups is None:
                self._launch(buffers, load, blocks, addresses, after, ends)
            else:
                groups.submit(load.events, ends, blocks, addresses, after, self._stream, buffers.timer)
            buffers.timer.stop(self._stream)
            if self._trial is not None and self._ways.is_due and self._trial.begin(addresses):
                self._ways.trying()
            self._driver.record_event(buffers.finished, self._stream)
        except BaseException:
            self._wait()  # what has been submitted must not write once another way has begun
            self._buffers.append(buffers)
            raise
        self._flying.append((buffers, load))
        return load

    def _launch(
        self,
        buffers: _Buffers,
        load: CudaLayeredLoad,
        blocks: Int64Array,
        addresses: Int64Array,
        after: Fence | None,
        ends: Sequence[int],
    ) -> None:
        driver, stream, count = self._driver, self._stream, len(blocks)
        buffers.places["slot"][:count], buffers.places["block"][:count] = addresses, blocks
        size = np.array([count * PLACE.itemsize], np.int64)
        driver.copy(np.array([buffers.device]), np.array([buffers.host]), size, "stream", stream)
        if isinstance(after, CudaFence):
            after.hold_back(stream)
        buffers.timer.start(stream)
        for event, (first, end) in zip(load.events, _pairs(ends), strict=True):
            start, stop = self._starts[first], self._starts[end]
            self._fetch.launch(self._table + start * PIECE.itemsize, stop - start, buffers.device, count, stream)
            driver.record_event(event, stream)

    def _launch_ends(self, num_blocks: int) -> list[int]:
        """The end of each launch, as a number of parts. With `n` launches, the computation waits for the first, which
        moves an `n`th of the load, and the host spends 50 us on each. The sum of both times is least if `n` is the
        square root of the load's bytes over `_LAUNCH_BYTES`."""
        ends, size = [], 0
        total = sum(self._part_bytes) * num_blocks
        least = total / max(1.0, sqrt(total / _LAUNCH_BYTES))
        for number, part_bytes in enumerate(self._part_bytes):
            size += part_bytes * num_blocks
            if size >= least or number == len(self._part_bytes) - 1:
                ends.append(number + 1)
                size = 0
        return ends

    @property
    def figures(self) -> LayerFigures:
        return self._ways.figures

    def advance(self) -> None:
        """Notice which loads have finished."""
        if self._trial is not None and (found := self._trial.take()) is not None:
            self._ways.tried(*found)
        while self._flying:
            buffers, load = self._flying[0]
            if not twice(partial(self._driver.is_reached, buffers.finished)):
                return
            self._flying.popleft()
            with suppress(DriverError):  # how long the load took stays unknown
                load.seconds = buffers.timer.take()
                self._ways.loaded(buffers.way, buffers.num_bytes, load.seconds)
            self._buffers.append(buffers)
            load.is_done = True  # last: the slots may be reused from now on

    def copy_now(self, device: Int64Array, host: Int64Array, size: Int64Array, after: Fence | None) -> None:
        """Copy `size[i]` bytes from `host[i]` to `device[i]`, and wait for it."""
        if isinstance(after, CudaFence):
            after.hold_back(self._stream)
        try:
            self._driver.copy(device, host, size, "stream", self._stream)
        finally:
            self._wait()

    def drain(self) -> None:
        """Wait for loads under way. Raises `DriverError` if the device is lost; then it accesses no memory."""
        self._wait()
        self.advance()

    def _wait(self) -> None:
        """Wait until nothing of any load is under way. Raises the last error, after trying all streams."""
        with ExitStack() as attempts:
            for stream in (self._stream, *(self._groups.streams if self._groups is not None else ())):
                attempts.callback(twice, partial(self._driver.synchronize, stream))


def _pieces(layout: KVLayout, bases: Sequence[int], part: Part) -> np.ndarray:
    """The pieces of this part, of which a warp copies one for each block."""
    rows = []
    for number, first, size in part:
        region, place = layout.regions[number], layout.offsets[number] + first
        for start in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - start)
            rows.append((bases[number] + first + start, region.stride_bytes, place + start, length))
    return np.array(rows, PIECE)


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))
