"""The CUDA context that torch works in, made current for one piece of work at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from kvstow.devices.cuda.driver import Driver, DriverError, Handle, load_driver


@cache
def primary_context(ordinal: int) -> Context:
    """The context of GPU `ordinal` (as torch counts them). Retained for the life of the process, as torch does."""
    return Context(load_driver(), ordinal)


class Context:
    """Thread-safe. Costs about 1 us per `current`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self._handle = driver.retain_primary_context(ordinal)

    def settle(self) -> None:
        """The calling thread works in this context from now on, in the way of `current`."""
        self._enter()

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread works in this context, and may do so while another thread captures a CUDA graph:
        otherwise a mere event query would break that capture. Both are put back afterwards; may be nested.

        Raises `DriverError` only before the body has begun: an error afterwards would hide what the body has done."""
        mode = self._enter()
        try:
            yield
        finally:
            with suppress(DriverError):  # a driver that refuses this refuses the next call too, and that one raises
                self.driver.exchange_capture_mode(mode)
            with suppress(DriverError):
                self.driver.pop_context()

    def _enter(self) -> Handle:
        """The capture mode before."""
        self.driver.push_context(self._handle)
        try:
            return self.driver.relax_capture()
        except BaseException:
            self.driver.pop_context()
            raise
