"""Buffers, streams, events and timers of copy batches, created once and reused."""

from __future__ import annotations

from contextlib import ExitStack

from kvstow.devices.cuda.driver import Driver, Handle


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
        """Seconds, once both points are reached; 0 if nothing was timed since the last call."""
        used, self._used = self._used, False
        return self._driver.seconds_between(self._start, self._stop) if used else 0.0


class StagingBuffer:
    """`num_bytes` of device memory at `address` (none for 0), and the stream of its copies. `undo` frees everything."""

    def __init__(self, driver: Driver, num_bytes: int, undo: ExitStack) -> None:
        self.address = 0
        if num_bytes:
            self.address = driver.allocate(num_bytes)
            undo.callback(driver.free, self.address)
        self.link = new_stream(driver, undo)


class BatchMarks:
    """The events and timers of one batch. `halfway` is between its two streams, `finished` after all of it."""

    def __init__(self, driver: Driver, undo: ExitStack) -> None:
        self.halfway, self.finished = (new_event(driver, undo, timing=False) for _ in range(2))
        self.staged_timer, self.direct_timer = Timer(driver, undo), Timer(driver, undo)

    def take_seconds(self) -> float:
        """Seconds of the batch's copies, once it is finished."""
        return self.staged_timer.take() + self.direct_timer.take()


def new_event(driver: Driver, undo: ExitStack, *, timing: bool) -> Handle:
    event = driver.create_event(timing=timing)
    undo.callback(driver.destroy_event, event)
    return event


def new_stream(driver: Driver, undo: ExitStack, *, urgent: bool = False) -> Handle:
    stream = driver.create_stream(urgent=urgent)
    undo.callback(driver.destroy_stream, stream)
    return stream
