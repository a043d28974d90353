"""Pinning of host memory for CUDA."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np

from kvstow.devices.cuda.context import Context, primary_context
from kvstow.devices.cuda.driver import DriverError, Int64Array
from kvstow.errors import PinError


class CudaRegistrar:
    """Registers ranges with the CUDA driver. One registrar per pool.

    While a thread captures a CUDA graph, registering in the default mode fails and breaks the capture (error 900), so
    each call uses the relaxed capture mode.
    """

    mode = "cuda"
    notice: str | None = None

    def __init__(self, ordinal: int = 0, *, context: Context | None = None) -> None:
        """`ordinal`: the GPU that copies, in torch's numbering. Raises `DriverUnavailableError`, `DriverError`."""
        self._context = context or primary_context(ordinal)
        self._home = threading.local()
        self.locked_bytes = 0
        self._starts: Int64Array = np.zeros(0, np.int64)

    @property
    def numa_node(self) -> int | None:
        """The node whose memory is nearest to the GPU, if there is more than one."""
        return self._context.driver.host_numa_node(self._context.ordinal)

    def prepare_thread(self) -> None:
        """Make the context current on this thread for good: each driver call releases the interpreter, and getting it
        back from a busy host takes up to 5 ms."""
        try:
            self._context.settle()
        except DriverError as error:
            raise PinError("driver", str(error)) from error
        self._home.is_settled = True

    def _current(self) -> AbstractContextManager[None]:
        return nullcontext() if getattr(self._home, "is_settled", False) else self._context.current()

    def register(self, address: int, num_bytes: int) -> None:
        starts = np.insert(self._starts, np.searchsorted(self._starts, address), address)  # before: it may raise
        try:
            with self._current():
                self._register(address, num_bytes)
        except DriverError as error:
            raise PinError("out_of_memory" if error.is_out_of_memory else "driver", str(error)) from error
        self._starts = starts
        self.locked_bytes += num_bytes

    def _register(self, address: int, num_bytes: int) -> None:
        try:
            self._context.driver.register_host(address, num_bytes)
        except DriverError:
            raise
        except BaseException:  # a signal handler may raise just after the driver has registered the range
            with suppress(DriverError):
                self._context.driver.unregister_host(address)
            raise

    def unregister(self, address: int, num_bytes: int) -> None:
        starts = self._starts[self._starts != address]
        try:
            with self._current():
                self._context.driver.unregister_host(address)
        except DriverError as error:
            raise PinError("driver", str(error)) from error
        self._starts = starts
        self.locked_bytes -= num_bytes

    def starts(self) -> Int64Array:
        """Where registered ranges begin, ascending: a copy must not span two ranges. Thread-safe; read-only."""
        return self._starts
