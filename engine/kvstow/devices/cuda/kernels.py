"""The kernels that pack pages into a staging buffer and unpack them."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstow.devices.cuda.context import Context
from kvstow.devices.cuda.driver import Driver, Handle, Int64Array

MAX_BLOCKS = 1000  # per launch; the arguments then just fit into a kernel's limit of 4 KiB
_THREADS = 128


@cache
def machine_code(driver: Driver, capability: tuple[int, int]) -> bytes:
    """Compiled once per process and kind of GPU."""
    source = files("kvstow.devices.cuda").joinpath("pages.cu").read_text()
    return driver.compile(source, capability)


class _Arguments(ctypes.Structure):
    """The arguments of both kernels, in their order (pages.cu)."""

    _fields_ = [
        ("pieces", ctypes.c_uint64),
        ("staging", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint64),
        ("blocks", ctypes.c_int32 * MAX_BLOCKS),
    ]


class PageKernels:
    """Moves the pages described by `pieces` (dtype `plan.PIECE`) between the KV cache and staging buffers, where a
    block takes `block_bytes`. Used by one thread. `undo` frees the memory on the device."""

    def __init__(self, context: Context, pieces: npt.NDArray[np.void], block_bytes: int, undo: ExitStack) -> None:
        driver = self._driver = context.driver
        module = driver.load_module(machine_code(driver, driver.compute_capability(context.ordinal)))
        undo.callback(driver.unload_module, module)
        self._functions = {name: driver.get_function(module, name) for name in ("gather", "scatter")}
        table = driver.allocate(pieces.nbytes)
        undo.callback(driver.free, table)
        driver.write(table, pieces)
        self._num_pieces, self._block_bytes = len(pieces), block_bytes
        self._arguments = _Arguments(pieces=table, block_bytes=block_bytes)
        self._blocks = np.ctypeslib.as_array(self._arguments.blocks)
        self._pointers = pointers_to_fields(self._arguments)

    def launch(self, name: Literal["gather", "scatter"], staging: int, blocks: Int64Array, stream: Handle) -> None:
        """Move the pages of `blocks`: `gather` to the staging buffer at address `staging`, `scatter` from it."""
        for start in range(0, len(blocks), MAX_BLOCKS):
            part = blocks[start : start + MAX_BLOCKS]
            self._blocks[: len(part)] = part
            self._arguments.staging = staging + start * self._block_bytes
            grid = (self._num_pieces, len(part))
            # The driver copies the arguments during the call.
            self._driver.launch(self._functions[name], grid, _THREADS, stream, ctypes.addressof(self._pointers))


def pointers_to_fields(arguments: ctypes.Structure) -> ctypes.Array[ctypes.c_uint64]:
    """What `Driver.launch` takes; `arguments` must outlive it."""
    start = ctypes.addressof(arguments)
    offsets = [getattr(type(arguments), field[0]).offset for field in arguments._fields_]
    return (ctypes.c_uint64 * len(offsets))(*(start + offset for offset in offsets))
