"""Extents: the blocks of shared memory that make up a node's pools. They are populated in the background, one chunk
at a time."""

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

EXTENT_NAME = "kvstow-extent"
STEP_BYTES = 64 << 20  # the watermark moves by whole steps

_PIECE_BYTES = 16 << 20  # between two checks whether to stop: 2 ms for huge pages, 10 for others

logger = logging.getLogger("kvstow.extents")


class Extent:
    """A memfd of `num_bytes`, a multiple of 2 MiB; those below `populated_bytes`, the watermark, may be shown to
    clients. The owner closes it, after the populator has released it (`Populator.discard`).

    Any thread may read the properties; only the populator's writes them, except `row`, which is the owner's.
    """

    def __init__(self, fd: int, num_bytes: int, huge_pages: HugePages, numa_node: int | None) -> None:
        """Takes over `fd`. Use `create` or `adopt`."""
        self.fd, self.num_bytes, self.huge_pages, self.numa_node = fd, num_bytes, huge_pages, numa_node
        self.populated_bytes = 0
        self.done_bytes = 0
        """What the populator has populated; the watermark follows by whole steps."""
        self.small_page_bytes = 0
        """How many of the bytes that this process has populated lie in pages of 4 KiB."""
        self.row: int | None = None
        """The row of the pool that waits for this memory; None if none does."""

    @classmethod
    def create(cls, num_bytes: int, huge_pages: HugePages = "advised", numa_node: int | None = None) -> Extent:
        """An extent that takes no memory yet. Raises `PinError`, or `ConfigError` for another size."""
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
        """An extent that an earlier service made, with its bytes; takes over `fd`. The watermark is where the memory
        has its first gap. Raises `ForeignMemoryError`, and then the caller still owns `fd`."""
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
        """Whether clients can map it. One that has its descriptor can seal it."""
        return is_unsealed(self.fd)

    def close(self) -> None:
        """Give the memory back, once no client and no keeper has it any more; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def record(self, end: int, small_page_bytes: int) -> None:
        """The bytes up to `end` are populated. Called by the populator; the watermark moves by whole steps."""
        self.small_page_bytes += small_page_bytes
        self.done_bytes = end
        self.populated_bytes = end if end == self.num_bytes else max(self.populated_bytes, end - end % STEP_BYTES)


@dataclass(slots=True)
class Window:
    """Address space through which extents are populated, one range of at most `STEP_BYTES` at a time. So this process
    keeps no mapping of a pool: neither page tables nor the pool's bytes in its resident size.

    Not locked: one thread at a time. The owner calls `close`.
    """

    notices: set[str] = field(default_factory=set, init=False)
    """The reasons why memory is not in huge pages or not on its node."""
    _region: HostRegion = field(default_factory=lambda: HostRegion(STEP_BYTES), init=False)
    _can_collapse: bool = field(default=True, init=False)
    _can_populate: bool = field(default=True, init=False)

    def populate(self, extent: Extent, start: int, end: int, stop: Callable[[], bool]) -> int | None:
        """Back the bytes from `start` to `end`, multiples of 2 MiB, with memory, in huge pages if the kernel can. Bytes
        that have memory keep their content. Returns how many lie in small pages, or None if `stop` ended it early.
        Raises `PinError`."""
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
        """Give the address space back; idempotent."""
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
        """Returns how many of the bytes lie in small pages afterwards."""
        is_reserved = extent.huge_pages == "reserved"
        small = 0 if is_reserved else self._make_huge(extent, offset, address, num_bytes)
        self._populate(extent, offset, address, num_bytes, libc if is_reserved or small else quick)
        return small

    def _make_huge(self, extent: Extent, offset: int, address: int, num_bytes: int) -> int:
        """Turn one 4 KiB page into a huge one, for each 2 MiB: 10 GiB/s, where populating 512 small pages first and
        collapsing them afterwards reaches 0.2 to 0.35. The kernel refuses a range without any page."""
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
        """Log why memory is slower than it could be. Each reason once: extents of several nodes take turns, and each
        node has a reason of its own."""
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
            os.posix_fallocate(extent.fd, offset, num_bytes)  # a kernel before 5.14
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
    """`degraded`: memory was refused; `failed`: an unexpected error. In both, `error` says why, what is populated stays
    usable, and `retry` tries again."""

    state: PopulatorState
    populated_bytes: int
    target_bytes: int
    small_page_bytes: int
    error: str | None


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
        self._taken = 0  # bytes populated by this process
        self._failure: str | None = None
        self._is_defective = False  # the failure is an unexpected error
        self._refusal = ""  # the reason that is in the log, until something can be populated again
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
            if not self._is_defective and not self._has_unfinished():
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
            return PopulatorStatus(
                self._current_state(),
                sum(extent.populated_bytes for extent in self._extents),
                sum(extent.num_bytes for extent in self._extents),
                sum(extent.small_page_bytes for extent in self._extents),
                self._failure,
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
                self._fail(str(error), is_defect=False)
            except Exception as error:
                logger.exception("populating stopped by a defect")
                self._fail(repr(error), is_defect=True)
            self._listeners.call()

    def _populate_next(self) -> bool:
        """Populate one chunk; False when the populator closes."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._current_state() == "populating")
            if self._closing:
                return False
            self._current = extent = min(filter(_is_unfinished, self._extents), key=_turn_of)
            if not extent.is_sound:  # one that no process can map any more must not stop the others
                self._extents.remove(extent)
                self._current = None
                return True
            start = max(extent.done_bytes, extent.populated_bytes)
        try:
            end = min(start + self._chunk_bytes, start - start % STEP_BYTES + STEP_BYTES, extent.num_bytes)
            self._allowance.require(self._taken, self._taken + end - start)
            small_page_bytes = self._window.populate(extent, start, end, lambda: not self._is_wanted(extent))
        finally:
            with self._state:
                self._current = None
                self._state.notify_all()
        self._refusal = ""
        until = self._clock() + self._pause
        with self._state:
            if small_page_bytes is not None and extent in self._extents:
                extent.record(end, small_page_bytes)
                self._taken += end - start
            while not self._closing and (seconds := until - self._clock()) > 0:
                self._state.wait(seconds)
            return not self._closing

    def _is_wanted(self, extent: Extent) -> bool:
        with self._state:
            return not self._closing and extent in self._extents

    def _fail(self, message: str, *, is_defect: bool) -> None:
        self._allowance.forget()
        with self._state:
            self._failure, self._is_defective = message, is_defect

    # Under `_state`.

    def _has_unfinished(self) -> bool:
        return any(map(_is_unfinished, self._extents))

    def _current_state(self) -> PopulatorState:
        if self._closing:
            return "closed"
        if self._thread is not None and not self._thread.is_alive():
            return "failed"
        if self._failure is not None:
            return "failed" if self._is_defective else "degraded"
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
