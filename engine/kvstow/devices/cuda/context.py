"""The CUDA context that torch uses, made current for one piece of work at a time, and what lives in it: events, fences
of streams, pinned host memory, and the buffers, streams and timers of copy batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvstow.devices.cuda.driver import Driver, DriverError, Handle, Int64Array, load_driver
from kvstow.errors import PinError

if TYPE_CHECKING:
    import torch

_MOST_IDLE = 256
"""A context keeps at most this many idle events. More fences are seldom alive at once."""


@cache
def primary_context(ordinal: int) -> CudaContext:
    """The context of GPU `ordinal` (torch's numbering). Retained for the life of the process, as torch does."""
    return CudaContext(load_driver(), ordinal)


class CudaContext:
    """The primary context of one GPU. Thread-safe. Each use of `current` costs about 1 us.

    It keeps events without timing for reuse, because creating and destroying one for each fence costs more than
    recording it. Each method for them is one list operation and takes no lock, because a fence returns its event when
    the last reference to it is dropped, which may happen in the middle of `take_event`.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self._handle = driver.retain_primary_context(ordinal)
        self._idle_events: list[Handle] = []

    def take_event(self) -> Handle:
        """An event with no other owner, which may have been recorded before. The caller has made the context
        current."""
        try:
            return self._idle_events.pop()
        except IndexError:
            return self.driver.create_event(timing=False)

    def give_back(self, event: Handle) -> None:
        """Take back an event that is no longer queried or waited for. Needs no current context."""
        if len(self._idle_events) < _MOST_IDLE:
            self._idle_events.append(event)
        else:
            with suppress(DriverError):  # the device is lost; the next copy reports it
                self.driver.destroy_event(event)

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
        """Make the context current, in relaxed capture mode. Returns the previous capture mode."""
        self.driver.push_context(self._handle)
        try:
            return self.driver.relax_capture()
        except BaseException:
            self.driver.pop_context()
            raise


class CudaFence:
    """Stands for the work that a stream held when the fence was recorded. Copies wait for it on the device.

    Thread-safe. The fence alone owns its event and never hands it out: code that may still query it or wait for it
    holds the fence. When the fence is collected, the event returns to the context's pool.
    """

    __slots__ = ("_context", "_event")

    def __init__(self, context: CudaContext) -> None:
        """Make a fence that is not recorded yet. Hosts call `record` instead."""
        self._context = context
        self._event = context.take_event()

    @classmethod
    def record(cls, stream: torch.cuda.Stream) -> CudaFence:
        """Record a fence after all work given to `stream` so far. Must not be called while `stream` captures a
        graph."""
        context = primary_context(stream.device_index)
        with context.current():
            fence = cls(context)
            context.driver.record_event(fence._event, stream.cuda_stream)
        return fence

    def query(self) -> bool:
        with self._context.current():
            return self._context.driver.is_reached(self._event)

    def hold_back(self, stream: Handle) -> None:
        """Make work queued on `stream` from now on wait, on the device, for the fence. The caller has made the context
        current."""
        self._context.driver.wait_event(stream, self._event)

    def __del__(self) -> None:
        event = getattr(self, "_event", None)  # its creation may have failed
        if event is not None:
            self._context.give_back(event)


class CudaRegistrar:
    """Registers ranges with the CUDA driver. One registrar per pool.

    While a thread captures a CUDA graph, registering in the default mode fails and breaks the capture (error 900), so
    each call uses the relaxed capture mode.
    """

    mode = "cuda"
    notice: str | None = None

    def __init__(self, ordinal: int = 0, *, context: CudaContext | None = None) -> None:
        """`ordinal`: the GPU that copies, in torch's numbering. Raises `DriverUnavailableError`, `DriverError`."""
        self._context = context or primary_context(ordinal)
        self._home = threading.local()
        self.locked_bytes = 0
        self._starts: Int64Array = np.zeros(0, np.int64)

    @property
    def numa_node(self) -> int | None:
        """The NUMA node whose memory is nearest to the GPU; None if there is none or it is unknown."""
        return self._context.driver.host_numa_node(self._context.ordinal)

    def prepare_thread(self) -> None:
        """Make the context current on this thread for good, which saves calls of the driver. Each of them releases the
        interpreter, and getting it back from a busy host takes up to 5 ms."""
        try:
            self._context.settle()
        except DriverError as error:
            raise PinError("driver", str(error)) from error
        self._home.is_settled = True

    def _current(self) -> AbstractContextManager[None]:
        return nullcontext() if getattr(self._home, "is_settled", False) else self._context.current()

    def register(self, address: int, num_bytes: int) -> None:
        starts = np.insert(self._starts, np.searchsorted(self._starts, address), address)  # first: it may raise
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
        """The addresses at which registered ranges begin, ascending. A copy must not span two ranges. Thread-safe;
        callers must not change the array."""
        return self._starts


class Timer:
    """Measures the device's time between two points of a stream."""

    def __init__(self, driver: Driver, undo: ExitStack) -> None:
        self._driver = driver
        self._start, self._stop = (new_event(driver, undo, timing=True) for _ in range(2))
        self._used = False

    def start(self, stream: Handle) -> None:
        self._driver.record_event(self._start, stream)

    def stop(self, stream: Handle) -> None:
        self._driver.record_event(self._stop, stream)
        self._used = True

    def take(self) -> float:
        """Seconds between the two points, both of which are reached; 0 if nothing was timed since the last call."""
        used, self._used = self._used, False
        return self._driver.seconds_between(self._start, self._stop) if used else 0.0


class StagingBuffer:
    """`num_bytes` of device memory at `address`, and the stream of its copies. `undo` frees both. If `num_bytes` is 0,
    there is no memory, and `address` is 0."""

    def __init__(self, driver: Driver, num_bytes: int, undo: ExitStack) -> None:
        self.address = 0
        if num_bytes:
            self.address = driver.allocate(num_bytes)
            undo.callback(driver.free, self.address)
        self.link = new_stream(driver, undo)


class BatchMarks:
    """The events and timers of one batch. `halfway` is recorded after its first half, `finished` after its second."""

    def __init__(self, driver: Driver, undo: ExitStack) -> None:
        self.halfway, self.finished = (new_event(driver, undo, timing=False) for _ in range(2))
        self.staged_timer, self.direct_timer = Timer(driver, undo), Timer(driver, undo)


def new_event(driver: Driver, undo: ExitStack, *, timing: bool) -> Handle:
    event = driver.create_event(timing=timing)
    undo.callback(driver.destroy_event, event)
    return event


def new_stream(driver: Driver, undo: ExitStack, *, urgent: bool = False) -> Handle:
    stream = driver.create_stream(urgent=urgent)
    undo.callback(driver.destroy_stream, stream)
    return stream
