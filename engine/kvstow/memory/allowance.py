"""How far the memory limits let a pool grow."""

from __future__ import annotations

from collections.abc import Callable

from kvstow.errors import PinError
from kvstow.memory.limits import Shortage

_ASKED_BYTES = 1 << 30  # a second's worth beside a busy host, which each file read disturbs
_PLENTY_BYTES = 2 << 30  # beyond those: more than anybody takes while they are populated, in 20 ms
_VALID_SECONDS = 1.0  # a pool may pause for hours, and others take the memory meanwhile


class Allowance:
    """Asks the limits, which stand in a dozen files, for more than one chunk at a time. Used by the pinning thread."""

    def __init__(self, shortage: Callable[[int], Shortage | None], clock: Callable[[], float]) -> None:
        """`shortage` says what forbids to take so many bytes more."""
        self._shortage, self._clock = shortage, clock
        self._end = 0
        self._valid_until = 0.0
        self.is_plenty = False
        """Whether what was allowed is so far from every limit that taking it ends no process."""

    def require(self, start: int, end: int) -> None:
        """Allow the pool's bytes from `start` to `end`. Raises `PinError` when they do not fit."""
        if end <= self._end and self._clock() < self._valid_until:
            return
        asked = max(end - start, _ASKED_BYTES)
        self.is_plenty = self._shortage(asked + _PLENTY_BYTES) is None
        if self.is_plenty or self._shortage(asked) is None:
            self._end, self._valid_until = start + asked, self._clock() + _VALID_SECONDS
        elif shortage := self._shortage(end - start):
            raise PinError(shortage.reason, f"the next chunk does not fit: {shortage.message}")

    def forget(self) -> None:
        """Ask anew next time."""
        self._end = 0
