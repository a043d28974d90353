"""Pinning: how a device registers populated memory for its copies, and the progress of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Registrar(Protocol):
    """Registers a pool's memory range by range. Called by one thread at a time: the pool's pinning thread, its host's
    thread (see `HostSteps`), and finally the thread that closes the pool."""

    @property
    def mode(self) -> str:
        """The current kind of pinning: "mlock", "cuda", "populate" (resident only), ..."""

    @property
    def locked_bytes(self) -> int:
        """Bytes that the kernel cannot swap out now."""

    @property
    def notice(self) -> str | None:
        """A sentence for people if the memory is not fully pinned, else None."""

    def prepare_thread(self) -> None:
        """Called once, first, on the pinning thread. If it raises `PinError` it is called again."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range of whole pages. Raises `PinError`; after any error none of it is pinned."""

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register` of the same range. Raises `PinError`; after any error the range is still pinned."""


class PopulateOnly:
    """Pins nothing: the memory is resident, but the kernel may swap it out."""

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
    """Rate and duration of the current or last growth. Not locked: the pool calls it under its own lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._elapsed = 0.0
        self._started: tuple[float, int] | None = None  # time and bytes when the growth began
        self._pinned: tuple[float, int] | None = None  # time and bytes when its last chunk was pinned

    def begin(self, pinned_bytes: int) -> None:
        """Growth starts at `pinned_bytes`. No effect while it is under way."""
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
        """Seconds of the current growth, or of the last one."""
        return self._elapsed if self._began is None else self._clock() - self._began

    @property
    def rate(self) -> float | None:
        """Bytes that the growth has pinned, divided by the time from its start to its last chunk, pauses included;
        None if it has pinned none. It does not change once the growth has ended or stalled."""
        if self._started is None or self._pinned is None:
            return None
        (began, before), (pinned, after) = self._started, self._pinned
        return (after - before) / (pinned - began) if pinned > began else None
