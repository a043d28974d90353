"""The CUDA context that torch works in, made current for one piece of work at a time, and its events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from kvstow.devices.cuda.driver import Driver, DriverError, Handle, load_driver


@cache
def primary_context(ordinal: int) -> Context:
    """The context of GPU `ordinal` (as torch counts them). Retained for the life of the process, as torch does."""
    return Context(load_driver(), ordinal)


_MOST_IDLE = 256  # events: seldom are more fences alive at once


class EventPool:
    """Events without timing, reused by one owner after another: creating and destroying one for each fence cost more
    than recording it.

    Thread-safe. Each method is one list operation and takes no lock: a fence returns its event wherever the last
    reference to it is dropped, which may be in the middle of `take`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: list[Handle] = []

    def take(self) -> Handle:
        """An event that nobody else has; it may have been recorded before. The context is current."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._driver.create_event(timing=False)

    def give_back(self, event: Handle) -> None:
        """Nobody asks for `event` or waits for it any more. Needs no current context."""
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(event)
        else:
            with suppress(DriverError):  # the device is lost; the next copy reports it
                self._driver.destroy_event(event)


class Context:
    """Thread-safe. Costs about 1 us per `current`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self._handle = driver.retain_primary_context(ordinal)
        self.events = EventPool(driver)

    def settle(self) -> None:
        """The calling thread works in this context from now on, in the way of `current`."""
        self._enter()

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread works in this context, and may do so while another thread captures a CUDA graph:
        otherwise a mere event query would break that capture. Both are put back afterwards; may be nested.

        Raises only before the body has begun: an error afterwards would hide what the body has done."""
        mode = self._enter()
        try:
            yield
        finally:
            with suppress(Exception):  # a driver that refuses this refuses the next call too, and that one raises
                self.driver.exchange_capture_mode(mode)
            with suppress(Exception):
                self.driver.pop_context()

    def _enter(self) -> Handle:
        """The capture mode before."""
        self.driver.push_context(self._handle)
        try:
            return self.driver.relax_capture()
        except BaseException:
            self.driver.pop_context()
            raise
