"""The kernel that reads host memory, and a trial of it beside the copy engine.

A trial follows a load: it reads 8 MiB of the load's slots by each way, into a staging buffer. The computation does not
wait for it, and the load holds its slots until it has ended. So both ways are measured in the memory that loads come
from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstow.devices.cuda.context import CudaContext, Timer, new_event
from kvstow.devices.cuda.copier import copy_to_device, load_kernels, pointers_to_fields, twice
from kvstow.devices.cuda.driver import DriverError, Handle, Int64Array
from kvstow.devices.cuda.layergroups import LayerGroups
from kvstow.devices.cuda.plan import PIECE

PIECE_BYTES = 4 << 10
"""Bytes that one warp copies at a time."""

PLACE = np.dtype([("slot", np.uint64), ("block", np.uint64)])
"""The address of a slot and the number of its block, as pages.cu declares them."""

_THREAD_BLOCKS, _THREADS = 4, 512
"""Thread blocks of a launch at most, and threads in each."""

_WARPS = _THREADS // 32
"""Warps in a thread block."""

_SPAN = 256 << 10
"""Bytes that a trial reads of each slot by each way: the size of the smallest groups."""

_SLOTS = 32
"""Slots that a trial reads."""


class _Arguments(ctypes.Structure):
    """The arguments of `fetch`, in their order (pages.cu)."""

    _fields_ = [
        ("pieces", ctypes.c_uint64),
        ("places", ctypes.c_uint64),
        ("num_pieces", ctypes.c_uint32),
        ("num_places", ctypes.c_uint32),
    ]


class Fetch:
    """The kernel `fetch`. Used by the host's thread."""

    def __init__(self, context: CudaContext, undo: ExitStack) -> None:
        self._driver = context.driver
        self.function = load_kernels(context, ("fetch",), undo)["fetch"]
        self._arguments = _Arguments()
        self._pointers = pointers_to_fields(self._arguments)

    def launch(self, pieces: int, num_pieces: int, places: int, num_places: int, stream: Handle) -> None:
        """Read the pieces of the slots in `places` into their pages. `pieces` and `places` are the addresses of tables
        in device memory."""
        arguments = self._arguments
        arguments.pieces, arguments.num_pieces = pieces, num_pieces
        arguments.places, arguments.num_places = places, num_places
        grid = (max(1, min(_THREAD_BLOCKS, -(-num_pieces * num_places // _WARPS))), 1)
        self._driver.launch(self.function, grid, _THREADS, stream, ctypes.addressof(self._pointers))


class TrialRates(NamedTuple):
    """What a trial has measured, in bytes a second."""

    kernel: float
    engine: float


class LayerTrial:
    """`begin` belongs to the host's thread, and `take` to the one that drives the device."""

    def __init__(
        self, context: CudaContext, fetch: Fetch, groups: LayerGroups, stream: Handle, undo: ExitStack
    ) -> None:
        driver = self._driver = context.driver
        self._fetch, self._buffers, self._stream = fetch, groups.buffers, stream
        self._target = self._buffers[0].staging.address
        rows = [(self._target + start, _SPAN, start, PIECE_BYTES) for start in range(0, _SPAN, PIECE_BYTES)]
        self._table, self._num_pieces = copy_to_device(driver, np.array(rows, PIECE), undo), len(rows)
        size = _SLOTS * PLACE.itemsize
        self._host, self._places = driver.allocate_host(size), driver.allocate(size)
        undo.callback(driver.free_host, self._host)
        undo.callback(driver.free, self._places)
        self._timers = [Timer(driver, undo) for _ in range(2)]
        self._finished = new_event(driver, undo, timing=False)
        self._is_under_way = False

    def first(self) -> TrialRates:
        """Measure now, in memory that is pinned for it, since there are no slots yet. Waits for the device."""
        with ExitStack() as undo:
            host = self._driver.allocate_host(_SLOTS * 2 * _SPAN)
            undo.callback(self._driver.free_host, host)
            undo.callback(twice, partial(self._driver.synchronize, self._stream))
            addresses = host + np.arange(_SLOTS, dtype=np.int64) * 2 * _SPAN
            self._submit(addresses)  # not measured: it also loads code and maps pages
            self._submit(addresses)
            self._driver.synchronize(self._stream)
            return self._found()

    def begin(self, addresses: Sequence[int] | Int64Array) -> bool:
        """Queue a trial that reads the slots at the first of these addresses. Returns False if there are too few of
        them, or if a trial is under way."""
        if self._is_under_way or len(addresses) < _SLOTS:
            return False
        self._submit(np.asarray(addresses[:_SLOTS], np.int64))
        self._is_under_way = True
        return True

    def take(self) -> TrialRates | None:
        """The rates of a trial that has ended since the last call, or None."""
        if not self._is_under_way or not twice(partial(self._driver.is_reached, self._finished)):
            return None
        with suppress(DriverError):  # its rates stay unknown until the next trial
            return self._found()
        return None

    def _submit(self, addresses: Int64Array) -> None:
        """Queue a trial. The two ways read different bytes of the slots, so that no cache has them for the second."""
        driver, stream = self._driver, self._stream
        places = np.ctypeslib.as_array((ctypes.c_uint8 * (_SLOTS * PLACE.itemsize)).from_address(self._host)).view(
            PLACE
        )
        places["slot"], places["block"] = addresses, np.arange(_SLOTS)
        size = np.array([_SLOTS * PLACE.itemsize], np.int64)
        driver.copy(np.array([self._places]), np.array([self._host]), size, "stream", stream)
        self._timers[0].start(stream)
        self._fetch.launch(self._table, self._num_pieces, self._places, _SLOTS, stream)
        self._timers[0].stop(stream)
        target = self._target + np.arange(_SLOTS, dtype=np.int64) * _SPAN
        self._timers[1].start(stream)
        driver.copy(target, addresses + _SPAN, np.full(_SLOTS, _SPAN, np.int64), "stream", stream)
        self._timers[1].stop(stream)
        driver.record_event(self._buffers[0].freed, stream)
        driver.record_event(self._finished, stream)

    def _found(self) -> TrialRates:
        try:
            kernel, engine = (_SLOTS * _SPAN / max(timer.take(), 1e-9) for timer in self._timers)
        finally:
            self._is_under_way = False
        return TrialRates(kernel, engine)
