"""Extents: the blocks of shared memory that make up a node's pools. They are populated in the background, one chunk
at a time.

All long calls go through ctypes, which releases the GIL while the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvstow.bytesize import format_size
from kvstow.callbacks import Callbacks
from kvstow.config import HugePages
from kvstow.errors import ConfigError, PinError
from kvstow.memfd import (
    MemfdIdentity,
    create_memfd,
    identify_memfd,
    is_unsealed,
    open_for_client,
    populated_prefix,
    require_memfd,
)
from kvstow.memory.limits import Allowance, MemoryLimits
from kvstow.memory.pinning import PinProgress
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, HostRegion, bytes_by_node, prefer_node, round_up

EXTENT_NAME = "kvstow-extent"
STEP_BYTES = 64 << 20  # the watermark moves by so much

_PIECE_BYTES = 16 << 20  # between two looks at whether to stop: 2 ms for huge pages, 10 for others
_NODE_STEP = 16 << 20  # bytes between two samples of where memory lies

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 10, 23, 25

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype, _libc.mmap.argtypes = _address, (_address, _size, _int, _int, _int, ctypes.c_long)
_libc.madvise.argtypes = (_address, _size, _int)

# For calls of some microseconds, which keep the interpreter lock: beside a thread that computes in Python, each that
# let go of it would wait 5 ms. With the others, populating reached 0.2 GiB/s there.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.mmap.restype, _quick.mmap.argtypes = _libc.mmap.restype, _libc.mmap.argtypes
_quick.madvise.argtypes = _libc.madvise.argtypes


@dataclass(frozen=True, slots=True)
class Populated:
    """What one call of `Window.populate` did. `small_page_bytes` of the bytes lie in pages of 4 KiB."""

    num_bytes: int
    small_page_bytes: int
    numa_bytes: Counter[int]


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
        """Of those populated by this process: bytes in pages of 4 KiB."""
        self.numa_bytes: Counter[int] = Counter()
        """The same by NUMA node; empty where the kernel does not tell."""
        self.notice: str | None = None
        """A sentence for people where memory cannot be bound to the node, else None."""
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

    def open_for_client(self) -> int:
        """A descriptor to send, which the caller closes. Raises `OSError`."""
        return open_for_client(self.fd)

    @property
    def is_closed(self) -> bool:
        return self.fd < 0

    def close(self) -> None:
        """Give the memory back, once no client and no keeper has it any more; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def record(self, populated: Populated, end: int) -> None:
        """The bytes up to `end` are populated. Called by the populator; the watermark moves by whole steps."""
        self.small_page_bytes += populated.small_page_bytes
        self.numa_bytes += populated.numa_bytes
        self.done_bytes = end
        self.populated_bytes = end if end == self.num_bytes else max(self.populated_bytes, end - end % STEP_BYTES)


@dataclass(slots=True)
class Window:
    """Address space through which extents are populated, one range of at most `STEP_BYTES` at a time. So this process
    keeps no mapping of a pool: neither page tables nor the pool's bytes in its resident size.

    Not locked: one thread at a time. The owner calls `close`.
    """

    notice: str | None = field(default=None, init=False)
    """A sentence for people where the kernel makes no huge pages, else None."""
    _region: HostRegion = field(default_factory=lambda: HostRegion(STEP_BYTES), init=False)
    _can_collapse: bool = field(default=True, init=False)
    _can_populate: bool = field(default=True, init=False)

    def populate(self, extent: Extent, start: int, end: int, stop: Callable[[], bool]) -> Populated | None:
        """Back `start` to `end`, multiples of 2 MiB, by memory, in huge pages if the kernel can. Bytes that are there
        already stay. None if `stop` said so in between. Raises `PinError`."""
        self._map(extent, start, end)
        try:
            small_page_bytes = 0
            for offset in range(start, end, _PIECE_BYTES):
                if stop():
                    return None
                piece = min(_PIECE_BYTES, end - offset)
                small_page_bytes += self._populate_piece(extent, offset, self._region.address + offset - start, piece)
            numa_bytes = bytes_by_node(self._region.address, end - start, _NODE_STEP)
            return Populated(end - start, small_page_bytes, numa_bytes)
        finally:
            self._unmap(end - start)

    def close(self) -> None:
        """Give the address space back; idempotent."""
        self._region.close()

    def _map(self, extent: Extent, start: int, end: int) -> None:
        size = end - start
        flags = _MAP_SHARED | _MAP_FIXED
        if _quick.mmap(self._region.address, size, _PROT_READ_WRITE, flags, extent.fd, start) != self._region.address:
            if extent.huge_pages == "reserved":
                why = "the machine or the cgroup has no reserved 2 MiB page left"
                raise PinError("hugepages", f"mapping {format_size(size)} failed: {why} ({_error_text()})")
            raise PinError("out_of_memory", f"mapping {format_size(size)} failed: {_error_text()}")
        _quick.madvise(self._region.address, size, _MADV_DONTFORK)
        if extent.numa_node is not None:
            extent.notice = prefer_node(self._region.address, size, extent.numa_node)

    def _unmap(self, num_bytes: int) -> None:
        """Put reserved address space back where the extent was mapped."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _libc.mmap(self._region.address, num_bytes, _PROT_NONE, flags, -1, 0) != self._region.address:
            raise PinError("out_of_memory", f"unmapping {format_size(num_bytes)} failed: {_error_text()}")
        _quick.madvise(self._region.address, num_bytes, _MADV_DONTFORK)

    def _populate_piece(self, extent: Extent, offset: int, address: int, num_bytes: int) -> int:
        """The bytes that lie in small pages afterwards."""
        small = 0 if extent.huge_pages == "reserved" else self._make_huge(extent, offset, address, num_bytes)
        is_there = extent.huge_pages != "reserved" and not small
        self._populate(extent, offset, address, num_bytes, _quick if is_there else _libc)
        return small

    def _make_huge(self, extent: Extent, offset: int, address: int, num_bytes: int) -> int:
        """Turn one 4 KiB page into a huge one, for each 2 MiB: 10 GiB/s, where populating 512 small pages first and
        collapsing them afterwards reaches 0.2 to 0.35. A range without any page is refused by the kernel."""
        if not self._can_collapse:
            return num_bytes
        for start in range(0, num_bytes, HUGE_PAGE_BYTES):
            self._populate(extent, offset + start, address + start, PAGE_BYTES, _quick)
        if _libc.madvise(address, num_bytes, _MADV_COLLAPSE) == 0:
            return 0
        if ctypes.get_errno() == errno.EINVAL:
            self._can_collapse = False
            self.notice = (
                "shared memory lies in 4 KiB pages, which take longer to register: MADV_COLLAPSE failed with "
                f"{_error_text()}; it needs Linux 6.1 and transparent huge pages"
            )
            return num_bytes
        starts = range(address, address + num_bytes, HUGE_PAGE_BYTES)
        refused: int = sum(_libc.madvise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) != 0 for start in starts)
        if refused:
            self.notice = f"some shared memory lies in 4 KiB pages: MADV_COLLAPSE failed with {_error_text()}"
        return refused * HUGE_PAGE_BYTES

    def _populate(self, extent: Extent, offset: int, address: int, num_bytes: int, library: ctypes.CDLL) -> None:
        if self._can_populate:
            if library.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0:
                return
            if ctypes.get_errno() != errno.EINVAL:
                raise self._refusal(extent, num_bytes, _error_text())
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


def _error_text() -> str:
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


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
            if not extent.is_sound:  # one that no process can map any more must not stop the others
                self._extents.remove(extent)
                self._current = None
                return True
            start = max(extent.done_bytes, extent.populated_bytes)
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
