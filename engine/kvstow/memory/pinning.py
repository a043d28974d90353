"""Pinning: the calls by which a device makes populated memory fit for its copies, and how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Registrar(Protocol):
    """Registers a pool's memory, range by range. Calls come one at a time: from the pool's pinning thread, from its
    host's (see `HostSteps`), and finally from the one that closes the pool."""

    @property
    def mode(self) -> str:
        """What pinning is at the moment: "mlock", "cuda", "populate" (nothing but resident), ..."""

    @property
    def locked_bytes(self) -> int:
        """Bytes that the machine may not take away now."""

    @property
    def notice(self) -> str | None:
        """A sentence for people where the memory is less than pinned, else None."""

    def prepare_thread(self) -> None:
        """Called once by the pinning thread before anything else. Raises `PinError`; it is then tried again."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range of whole pages. Raises `PinError`; after any error it has pinned none of it."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register` of the same range. Raises `PinError`; after any error the range still counts as pinned."""


class PopulateOnly:
    """Pins nothing: the memory is resident, and the machine may swap it."""

    mode = "populate"
    locked_bytes = 0
    notice = None

    def prepare_thread(self) -> None:
        """Nothing to prepare."""

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to pin."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Nothing to undo."""


class PinProgress:
    """How fast the current or last growth is, and how long it has taken. Not locked: the pool calls it
    under its own lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._elapsed = 0.0
        self._started: tuple[float, int] | None = None  # time and bytes at the begin of the growth
        self._pinned: tuple[float, int] | None = None  # and when its last chunk was pinned

    def begin(self, pinned_bytes: int) -> None:
        """Growth starts from `pinned_bytes`; nothing changes where it is under way."""
        if self._began is None:
            self._began = self._clock()
            self._started, self._pinned = (self._began, pinned_bytes), None

    def record(self, pinned_bytes: int) -> None:
        self._pinned = self._clock(), pinned_bytes

    def end(self) -> None:
        self._elapsed = self.elapsed
        self._began = None

    @property
    def elapsed(self) -> float:
        """Seconds of the present growth, or of the last one."""
        return self._elapsed if self._began is None else self._clock() - self._began

    @property
    def rate(self) -> float | None:
        """Bytes that the growth has pinned, divided by the time from its start to its last chunk, pauses included;
        None if it has pinned none. It does not change once the growth has ended or stalled."""
        if self._started is None or self._pinned is None:
            return None
        (began, before), (pinned, after) = self._started, self._pinned
        return (after - before) / (pinned - began) if pinned > began else None
