"""Pinning host memory for CUDA."""

from __future__ import annotations

import numpy as np

from kvstow.devices.cuda.context import Context, primary_context
from kvstow.devices.cuda.driver import DriverError, Int64Array
from kvstow.errors import PinError


class CudaRegistrar:
    """Registers ranges with the CUDA driver. One registrar per pool."""

    mode = "cuda"
    notice: str | None = None

    def __init__(self, ordinal: int = 0, *, context: Context | None = None) -> None:
        """`ordinal`: the GPU that copies, as torch counts them. Raises `DriverUnavailableError`, `DriverError`."""
        self._context = context or primary_context(ordinal)
        self._ranges: dict[int, int] = {}
        self._starts: Int64Array = np.zeros(0, np.int64)

    @property
    def locked_bytes(self) -> int:
        return sum(tuple(self._ranges.values()))

    def prepare_thread(self) -> None:
        """Nothing to prepare: each call makes the context current and relaxes the thread's capture mode."""

    def register(self, address: int, num_bytes: int) -> None:
        try:
            with self._context.current():
                self._context.driver.register_host(address, num_bytes)
        except DriverError as error:
            raise PinError("out_of_memory" if error.is_out_of_memory else "driver", str(error)) from error
        self._ranges[address] = num_bytes
        self._list_starts()

    def unregister(self, address: int, num_bytes: int) -> None:
        try:
            with self._context.current():
                self._context.driver.unregister_host(address)
        except DriverError as error:
            raise PinError("driver", str(error)) from error
        del self._ranges[address]
        self._list_starts()

    def starts(self) -> Int64Array:
        """Where registered ranges begin, ascending: one copy must not run over from a range into the next.
        Thread-safe; not to be written to."""
        return self._starts

    def _list_starts(self) -> None:
        self._starts = np.array(sorted(self._ranges), np.int64)
