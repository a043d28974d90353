"""Extents: the pieces of shared memory that make up a node's pools. A thread populates them in the background."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvstow.bytesize import format_size
from kvstow.callbacks import Callbacks
from kvstow.config import HugePages
from kvstow.errors import ConfigError, PinError
from kvstow.memfd import (
    MemfdIdentity,
    create_memfd,
    identify_memfd,
    is_unsealed,
    populated_prefix,
    require_memfd,
)
from kvstow.memory.limits import Allowance, MemoryLimits
from kvstow.memory.region import (
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    MADV_POPULATE_WRITE,
    PAGE_BYTES,
    HostRegion,
    error_text,
    libc,
    prefer_node,
    quick,
    round_up,
)

logger = logging.getLogger("kvstow.extents")

EXTENT_NAME = "kvstow-extent"
"""The name of every extent's memfd."""
STEP_BYTES = 64 << 20
"""The watermark of an extent moves by steps of this size."""

_PIECE_BYTES = 16 << 20
"""How many bytes are populated between two checks whether to stop. It takes 2 ms in huge pages, and 10 ms in others."""


class Extent:
    """A memfd of `num_bytes`, a multiple of 2 MiB. Its bytes below the watermark, `populated_bytes`, may be shown to
    clients. The owner closes it after the populator has released it (`Populator.discard`).

    Any thread may read the fields. Only the populator's thread writes them, except `row`, which the owner writes.
    """

    def __init__(self, fd: int, num_bytes: int, huge_pages: HugePages, numa_node: int | None) -> None:
        """Takes over `fd`. Call `create` or `adopt` instead."""
        self.fd, self.num_bytes, self.huge_pages, self.numa_node = fd, num_bytes, huge_pages, numa_node
        self.populated_bytes = 0
        """The watermark, in bytes."""
        self.done_bytes = 0
        """How many bytes are populated. The watermark follows in whole steps."""
        self.small_page_bytes = 0
        """How many of the bytes that this process has populated lie in pages of 4 KiB."""
        self.row: int | None = None
        """The row of the pool that waits for this memory, or None."""

    @classmethod
    def create(cls, num_bytes: int, huge_pages: HugePages = "advised", numa_node: int | None = None) -> Extent:
        """Create an extent that takes no memory yet. Raises `PinError` if the kernel refuses, and `ConfigError` if the
        size is no multiple of 2 MiB."""
        _require_whole_pages(num_bytes)
        fd = create_memfd(EXTENT_NAME, num_bytes, reserved_huge_pages=huge_pages == "reserved")
        return cls(fd, num_bytes, huge_pages, numa_node)

    @classmethod
    def adopt(
        cls,
        fd: int,
        num_bytes: int,
        huge_pages: HugePages = "advised",
        numa_node: int | None = None,
        *,
        identity: MemfdIdentity | None = None,
    ) -> Extent:
        """Take over an extent of an earlier service and its content. Its watermark is at the first gap in its memory.

        Takes over `fd`, unless it raises `ForeignMemoryError`.
        """
        require_memfd(fd, EXTENT_NAME, num_bytes, identity=identity)
        extent = cls(fd, num_bytes, huge_pages, numa_node)
        prefix = populated_prefix(fd, reserved_huge_pages=huge_pages == "reserved")
        extent.populated_bytes = num_bytes if prefix >= num_bytes else prefix - prefix % STEP_BYTES
        return extent

    @property
    def identity(self) -> MemfdIdentity:
        return identify_memfd(self.fd)

    @property
    def is_sound(self) -> bool:
        """Whether clients can still map it. A client that has its descriptor can seal it."""
        return is_unsealed(self.fd)

    def close(self) -> None:
        """Close the descriptor. The memory is free once no client and no keeper has it any more. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def record(self, end: int, small_page_bytes: int) -> None:
        """Record that the bytes up to `end` are populated, `small_page_bytes` of them in pages of 4 KiB. The watermark
        moves by whole steps. Only the populator calls this."""
        self.small_page_bytes += small_page_bytes
        self.done_bytes = end
        self.populated_bytes = end if end == self.num_bytes else max(self.populated_bytes, end - end % STEP_BYTES)


@dataclass(slots=True)
class Window:
    """A range of address space through which extents are populated, at most `STEP_BYTES` at a time. So this process
    keeps no mapping of a pool, which would cost page tables and count in its resident size.

    Not locked, so only one thread at a time may use it. The owner calls `close`.
    """

    notices: set[str] = field(default_factory=set, init=False)
    """The logged reasons why memory is not in huge pages or not on its node."""
    _region: HostRegion = field(default_factory=lambda: HostRegion(STEP_BYTES), init=False)
    _can_collapse: bool = field(default=True, init=False)
    _can_populate: bool = field(default=True, init=False)

    def populate(self, extent: Extent, start: int, end: int, stop: Callable[[], bool]) -> int | None:
        """Populate the bytes from `start` to `end`, which are multiples of 2 MiB, in huge pages if the kernel can.
        Populated bytes keep their content. Returns how many of the bytes lie in small pages, or None if `stop` returned
        True. Raises `PinError`."""
        self._map(extent, start, end)
        try:
            small_page_bytes = 0
            for offset in range(start, end, _PIECE_BYTES):
                if stop():
                    return None
                piece = min(_PIECE_BYTES, end - offset)
                small_page_bytes += self._populate_piece(extent, offset, self._region.address + offset - start, piece)
            return small_page_bytes
        finally:
            self._region.unmap_file(0, end - start)

    def close(self) -> None:
        """Give the address space back. Idempotent."""
        self._region.close()

    def _map(self, extent: Extent, start: int, end: int) -> None:
        size = end - start
        try:
            self._region.map_file(0, size, extent.fd, start)
        except PinError as error:
            if extent.huge_pages != "reserved":
                raise
            why = "the machine or the cgroup has no reserved 2 MiB page left"
            raise PinError("hugepages", f"{why}: {error}") from error
        if extent.numa_node is not None:
            self._warn(prefer_node(self._region.address, size, extent.numa_node))

    def _populate_piece(self, extent: Extent, offset: int, address: int, num_bytes: int) -> int:
        """Populate a piece. Returns how many of its bytes lie in small pages."""
        is_reserved = extent.huge_pages == "reserved"
        small = 0 if is_reserved else self._make_huge(extent, offset, address, num_bytes)
        self._populate(extent, offset, address, num_bytes, libc if is_reserved or small else quick)
        return small

    def _make_huge(self, extent: Extent, offset: int, address: int, num_bytes: int) -> int:
        """Populate one small page of every 2 MiB, and let the kernel collapse each to a huge page. Returns how many
        bytes it could not make huge.

        The kernel collapses no range without any page. With one page it reaches 10 GiB/s, and with all 512 pages only
        0.2 to 0.35 GiB/s.
        """
        if not self._can_collapse:
            return num_bytes
        for start in range(0, num_bytes, HUGE_PAGE_BYTES):
            self._populate(extent, offset + start, address + start, PAGE_BYTES, quick)
        if libc.madvise(address, num_bytes, MADV_COLLAPSE) == 0:
            return 0
        if ctypes.get_errno() == errno.EINVAL:
            self._can_collapse = False
            self._warn(
                "shared memory lies in 4 KiB pages, which take longer to register: MADV_COLLAPSE failed with "
                f"{error_text()}; it needs Linux 6.1 and transparent huge pages"
            )
            return num_bytes
        starts = range(address, address + num_bytes, HUGE_PAGE_BYTES)
        refused: int = sum(libc.madvise(start, HUGE_PAGE_BYTES, MADV_COLLAPSE) != 0 for start in starts)
        if refused:
            self._warn(f"some shared memory lies in 4 KiB pages: MADV_COLLAPSE failed with {error_text()}")
        return refused * HUGE_PAGE_BYTES

    def _warn(self, notice: str | None) -> None:
        """Log why memory is slower than it could be. Each reason is logged once only, because extents of several nodes
        take turns, and each node may have a reason of its own."""
        if notice is not None and notice not in self.notices:
            self.notices.add(notice)
            logger.warning("%s", notice)

    def _populate(self, extent: Extent, offset: int, address: int, num_bytes: int, library: ctypes.CDLL) -> None:
        if self._can_populate:
            if library.madvise(address, num_bytes, MADV_POPULATE_WRITE) == 0:
                return
            if ctypes.get_errno() != errno.EINVAL:
                raise self._refusal(extent, num_bytes, error_text())
            self._can_populate = False
        try:
            os.posix_fallocate(extent.fd, offset, num_bytes)  # for a kernel before 5.14
        except OSError as error:
            raise self._refusal(extent, num_bytes, error.strerror or str(error)) from error

    @staticmethod
    def _refusal(extent: Extent, num_bytes: int, why: str) -> PinError:
        if extent.huge_pages == "reserved":
            why = f"the machine or the cgroup has no reserved 2 MiB page left ({why})"
            return PinError("hugepages", f"populating {format_size(num_bytes)} failed: {why}")
        return PinError("out_of_memory", f"populating {format_size(num_bytes)} failed: {why}")


def _require_whole_pages(num_bytes: int) -> None:
    if num_bytes <= 0 or num_bytes != round_up(num_bytes, HUGE_PAGE_BYTES):
        raise ConfigError("size of an extent", num_bytes, "a multiple of 2 MiB")


PopulatorState = Literal["populating", "ready", "paused", "degraded", "failed", "closed"]


class PopulatorStatus(NamedTuple):
    """The state of a populator at one moment. It is `degraded` if the kernel or a limit refused memory, and `failed`
    after an unexpected error. In both cases `error` says why, populated memory stays usable, and `retry` tries
    again."""

    state: PopulatorState
    populated_bytes: int
    target_bytes: int
    small_page_bytes: int
    error: str | None


class Populator:
    """Populates the extents that pools wait for, and then the others in the order in which they were added.

    Extents of lower rows come first, whatever their pool. The extents of one row take turns, one step of the watermark
    each, because a slot is usable only when it is populated on every rank.

    Guarantees: bytes below an extent's watermark are populated. A refusal or an error stops populating, but does not
    end the thread. `status` shows it until `retry` or the next `add`. After `discard` has returned, the populator no
    longer uses the extent. After `close` the thread has ended.

    Thread-safe. `_state` guards the fields, and is never held during a long system call.
    """

    def __init__(
        self,
        limits: MemoryLimits,
        *,
        chunk_bytes: int = STEP_BYTES,
        pause: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The thread populates `chunk_bytes` (at most `STEP_BYTES`) at a time, and then pauses for `pause` seconds.
        Raises `PinError` if there is no address space, and `ConfigError`."""
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
        self._current: Extent | None = None
        """The extent that the thread is populating."""
        self._taken_bytes = 0
        """How many bytes this process has populated."""
        self._failure: str | None = None
        self._is_unexpected = False
        """The failure is an unexpected error, and no refusal of memory."""
        self._logged_reason = ""
        """The reason of the last refusal in the log, until a chunk is populated again."""
        self._listeners = Callbacks()
        self._paused = self._closing = False
        self._window = Window()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start populating in the background. Idempotent."""
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
        """Populate this extent, too. This is also a new attempt after a failure."""
        with self._state:
            self._extents.append(extent)
            self._failure = None
            self._state.notify_all()

    def discard(self, extent: Extent) -> None:
        """Stop populating the extent. Waits some milliseconds for a call under way. An unknown extent is ignored. The
        caller closes the extent."""
        with self._state:
            if extent not in self._extents:
                return
            self._extents.remove(extent)
            self._state.wait_for(lambda: self._current is not extent)
            if not self._is_unexpected and not self._has_unfinished():
                self._failure = None  # the refused memory is not wanted any more

    def set_paused(self, paused: bool) -> None:
        """While paused, populate no further chunk."""
        with self._state:
            self._paused = paused
            self._state.notify_all()

    def retry(self) -> None:
        """Try to populate again after a failure. Without a failure, nothing happens."""
        with self._state:
            self._failure = None
            self._state.notify_all()

    def status(self) -> PopulatorStatus:
        with self._state:
            return PopulatorStatus(
                self._current_state(),
                sum(extent.populated_bytes for extent in self._extents),
                sum(extent.num_bytes for extent in self._extents),
                sum(extent.small_page_bytes for extent in self._extents),
                self._failure,
            )

    def close(self) -> None:
        """Stop within milliseconds. The extents stay as they are. Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._window.close()

    # The populating thread calls the following methods.

    def _run(self) -> None:
        while True:
            try:
                if not self._populate_next():
                    return
            except PinError as error:
                if error.reason != self._logged_reason:  # the node tries again and again
                    logger.warning("populating stopped: %s", error)
                self._logged_reason = error.reason
                self._fail(str(error), is_unexpected=False)
            except Exception as error:
                logger.exception("populating stopped: unexpected error")
                self._fail(repr(error), is_unexpected=True)
            self._listeners.call()

    def _populate_next(self) -> bool:
        """Wait until there is something to populate, and populate one chunk. Returns False when the populator
        closes."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._current_state() == "populating")
            if self._closing:
                return False
            self._current = extent = min(filter(_is_unfinished, self._extents), key=_turn_of)
            if not extent.is_sound:  # it can be mapped no more, and must not stop the others
                self._extents.remove(extent)
                self._current = None
                return True
            start = max(extent.done_bytes, extent.populated_bytes)
        try:
            end = min(start + self._chunk_bytes, start - start % STEP_BYTES + STEP_BYTES, extent.num_bytes)
            self._allowance.require(self._taken_bytes, self._taken_bytes + end - start)
            small_page_bytes = self._window.populate(extent, start, end, lambda: not self._is_wanted(extent))
        finally:
            with self._state:
                self._current = None
                self._state.notify_all()
        self._logged_reason = ""
        until = self._clock() + self._pause
        with self._state:
            if small_page_bytes is not None and extent in self._extents:
                extent.record(end, small_page_bytes)
                self._taken_bytes += end - start
            while not self._closing and (seconds := until - self._clock()) > 0:
                self._state.wait(seconds)
            return not self._closing

    def _is_wanted(self, extent: Extent) -> bool:
        with self._state:
            return not self._closing and extent in self._extents

    def _fail(self, message: str, *, is_unexpected: bool) -> None:
        self._allowance.forget()
        with self._state:
            self._failure, self._is_unexpected = message, is_unexpected

    # Callers of the following methods hold `_state`.

    def _has_unfinished(self) -> bool:
        return any(map(_is_unfinished, self._extents))

    def _current_state(self) -> PopulatorState:
        if self._closing:
            return "closed"
        if self._thread is not None and not self._thread.is_alive():
            return "failed"
        if self._failure is not None:
            return "failed" if self._is_unexpected else "degraded"
        if not self._has_unfinished():
            return "ready"
        return "paused" if self._paused else "populating"


def _is_unfinished(extent: Extent) -> bool:
    return extent.populated_bytes < extent.num_bytes


def _turn_of(extent: Extent) -> tuple[float, float]:
    """Return the extent's place in the order of populating. Lower ones come first. Within a row, the extent comes first
    whose watermark has the lowest share of its size: the watermark makes each turn a whole step, and the share takes
    into account that the slots of some ranks are larger."""
    row = extent.row
    return (math.inf, 0.0) if row is None else (row, extent.populated_bytes / extent.num_bytes)
