"""The CUDA context that torch uses, made current for one piece of work at a time, and its events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from kvstow.devices.cuda.driver import Driver, DriverError, Handle, load_driver


@cache
def primary_context(ordinal: int) -> Context:
    """The context of GPU `ordinal` (torch's numbering). Retained for the life of the process, as torch does."""
    return Context(load_driver(), ordinal)


_MOST_IDLE = 256  # events: more fences are seldom alive at once


class EventPool:
    """Events without timing, for reuse: creating and destroying one for each fence cost more than recording it.

    Thread-safe. Each method is one list operation and takes no lock: a fence returns its event when the last reference
    to it is dropped, which may happen in the middle of `take`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: list[Handle] = []

    def take(self) -> Handle:
        """An event with no other owner; it may have been recorded before. The context is current."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._driver.create_event(timing=False)

    def give_back(self, event: Handle) -> None:
        """Take back an event that is no longer queried or waited for. Needs no current context."""
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
        """Make the context current on the calling thread for good, as `current` does for a while."""
        self._enter()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on the calling thread, in relaxed capture mode: in the default mode even an event
        query would break a CUDA graph capture of another thread. Restores both afterwards; may be nested.

        Raises only before the body begins: a later error would hide what the body has done."""
        mode = self._enter()
        try:
            yield
        finally:
            with suppress(Exception):  # a driver that refuses this will refuse the next call too, which raises
                self.driver.exchange_capture_mode(mode)
            with suppress(Exception):
                self.driver.pop_context()

    def _enter(self) -> Handle:
        """Returns the previous capture mode."""
        self.driver.push_context(self._handle)
        try:
            return self.driver.relax_capture()
        except BaseException:
            self.driver.pop_context()
            raise
