"""Populating: extents get their memory in the background, one chunk at a time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstow.callbacks import Callbacks
from kvstow.errors import ConfigError, PinError
from kvstow.memory.extents import STEP_BYTES, Extent, Window
from kvstow.memory.limits import Allowance, MemoryLimits
from kvstow.memory.pinning import PinProgress
from kvstow.memory.region import HUGE_PAGE_BYTES, round_up

PopulatorState = Literal["populating", "ready", "paused", "degraded", "failed", "closed"]

_DEFECT = "internal"  # the reason of failures that are not a `PinError`

logger = logging.getLogger("kvstow.extents")


@dataclass(frozen=True, kw_only=True)
class PopulatorStatus:
    """One view of a populator. `degraded`: memory was refused; `failed`: an unexpected error. In both, `error_reason`
    and `error` say why, what is populated stays usable, and `retry` tries again."""

    state: PopulatorState
    populated_bytes: int
    target_bytes: int
    small_page_bytes: int
    numa_bytes: Mapping[int, int]
    rate_bytes_per_second: float | None
    elapsed_seconds: float
    notice: str | None
    error_reason: str | None
    error: str | None
    failures: Mapping[str, int]


class Populator:
    """Populates the extents that pools wait for, then the others in the order in which they were added.

    The extents of a row take turns, one step of the watermark each, because a slot is usable once it is populated on
    every rank. Lower rows go first, over all pools.

    Guarantees: bytes below an extent's watermark have memory. A refusal or an error stops populating, not the thread,
    and is shown until `retry` or the next `add`. After `discard` returned, the populator no longer uses the extent.
    After `close` the thread has ended.

    Thread-safe. `_state` guards the fields and is never held during a system call that takes long.
    """

    def __init__(
        self,
        limits: MemoryLimits,
        *,
        chunk_bytes: int = STEP_BYTES,
        pause: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk_bytes` are populated at once, at most `STEP_BYTES`, then others have the machine for `pause` seconds.
        Raises `PinError` when there is no address space."""
        if chunk_bytes <= 0:
            raise ConfigError("chunk", chunk_bytes, "more than 0 bytes")
        if pause < 0:
            raise ConfigError("pause", pause, "0 seconds or more")
        self._chunk_bytes = min(round_up(chunk_bytes, HUGE_PAGE_BYTES), STEP_BYTES)
        self._pause = pause
        self._clock = clock
        self._allowance = Allowance(limits.shortage, clock)
        self._state = threading.Condition()
        self._extents: list[Extent] = []
        self._current: Extent | None = None  # the thread is populating it
        self._done: dict[int, int] = {}  # by id of the extent: bytes populated beyond its watermark
        self._taken = 0  # bytes populated by this process
        self._failure: tuple[str, str] | None = None
        self._refusal = ""
        """The reason that is in the log, until something can be populated again."""
        self._failures: Counter[str] = Counter()
        self._progress = PinProgress(clock)
        self._listeners = Callbacks()
        self._paused = self._closing = False
        self._window = Window()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start populating in the background; idempotent."""
        with self._state:
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name="kvstow-populate", daemon=True)
                thread.start()
                self._thread = thread

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the populating thread after each chunk and each failure. It must neither block nor call
        `discard` or `close`."""
        self._listeners.register(callback)

    def add(self, extent: Extent) -> None:
        """Populate it, too. This is also a new attempt after a failure."""
        with self._state:
            self._extents.append(extent)
            self._failure = None
            self._state.notify_all()

    def discard(self, extent: Extent) -> None:
        """Leave the extent alone. Waits for the call under way: some milliseconds. Nothing happens if it is not there.
        The caller closes it."""
        with self._state:
            if extent not in self._extents:
                return
            self._extents.remove(extent)
            self._state.wait_for(lambda: self._current is not extent)
            self._done.pop(id(extent), None)
            if self._failure is not None and self._failure[0] != _DEFECT and not self._has_unfinished():
                self._failure = None  # what was refused is not wanted any more

    def set_paused(self, paused: bool) -> None:
        """Start no further chunk until unpaused."""
        with self._state:
            self._paused = paused
            self._state.notify_all()

    def retry(self) -> None:
        """Try what was refused once more; nothing happens if nothing was."""
        with self._state:
            self._failure = None
            self._state.notify_all()

    def status(self) -> PopulatorStatus:
        with self._state:
            extents = self._extents
            reason, error = self._failure or (None, None)
            numa_bytes: Counter[int] = Counter()
            for extent in extents:
                numa_bytes.update(extent.numa_bytes)
            notices = dict.fromkeys(filter(None, (self._window.notice, *(extent.notice for extent in extents))))
            return PopulatorStatus(
                state=self._current_state(),
                populated_bytes=sum(extent.populated_bytes for extent in extents),
                target_bytes=sum(extent.num_bytes for extent in extents),
                small_page_bytes=sum(extent.small_page_bytes for extent in extents),
                numa_bytes=dict(numa_bytes),
                rate_bytes_per_second=self._progress.rate,
                elapsed_seconds=self._progress.elapsed,
                notice="; ".join(notices) or None,
                error_reason=reason,
                error=error,
                failures=dict(self._failures),
            )

    def close(self) -> None:
        """Stop within milliseconds; idempotent. The extents stay as they are."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._window.close()

    # The populating thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._populate_next():
                    return
            except PinError as error:
                if error.reason != self._refusal:  # the node tries again and again
                    logger.warning("populating stopped: %s", error)
                self._refusal = error.reason
                self._fail(error.reason, str(error))
            except Exception as error:
                logger.exception("populating stopped by a defect")
                self._fail(_DEFECT, repr(error))
            self._listeners.call()

    def _populate_next(self) -> bool:
        """Populate one chunk; False when the populator closes."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._may_populate())
            if self._closing:
                return False
            self._current = extent = min(filter(_is_unfinished, self._extents), key=_turn_of)
            start = self._done.get(id(extent), extent.populated_bytes)
            self._progress.begin(self._taken)
        try:
            end = min(start + self._chunk_bytes, start - start % STEP_BYTES + STEP_BYTES, extent.num_bytes)
            self._allowance.require(self._taken, self._taken + end - start)
            populated = self._window.populate(extent, start, end, lambda: not self._is_wanted(extent))
        finally:
            with self._state:
                self._current = None
                self._state.notify_all()
        self._refusal = ""
        with self._state:
            if populated is not None and extent in self._extents:
                extent.record(populated, end)
                self._done[id(extent)] = end
                self._taken += populated.num_bytes
                self._progress.record(self._taken)
                if not self._has_unfinished():
                    self._progress.end()
        return self._wait_for_pause()

    def _wait_for_pause(self) -> bool:
        until = self._clock() + self._pause
        with self._state:
            while not self._closing and (seconds := until - self._clock()) > 0:
                self._state.wait(seconds)
            return not self._closing

    def _is_wanted(self, extent: Extent) -> bool:
        with self._state:
            return not self._closing and extent in self._extents

    def _fail(self, reason: str, message: str) -> None:
        self._allowance.forget()
        with self._state:
            self._failure = reason, message
            self._failures[reason] += 1
            self._progress.end()

    # Under `_state`.

    def _has_unfinished(self) -> bool:
        return any(map(_is_unfinished, self._extents))

    def _may_populate(self) -> bool:
        return self._failure is None and not self._paused and self._has_unfinished()

    def _current_state(self) -> PopulatorState:
        if self._closing:
            return "closed"
        if self._thread is not None and not self._thread.is_alive():
            return "failed"
        if self._failure is not None:
            return "failed" if self._failure[0] == _DEFECT else "degraded"
        if not self._has_unfinished():
            return "ready"
        return "paused" if self._paused else "populating"


def _is_unfinished(extent: Extent) -> bool:
    return extent.populated_bytes < extent.num_bytes


def _turn_of(extent: Extent) -> tuple[float, float]:
    """The lowest is populated next. By the watermark, so that each turn is a whole step, and by its share of the
    extent, because the slots of some ranks are larger."""
    row = extent.row
    return (math.inf, 0.0) if row is None else (row, extent.populated_bytes / extent.num_bytes)
