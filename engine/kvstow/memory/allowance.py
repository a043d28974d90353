"""How far a pool may grow within the memory limits."""

from __future__ import annotations

from collections.abc import Callable

from kvstow.errors import PinError
from kvstow.memory.limits import Shortage

_ASKED_BYTES = 1 << 30  # a second of growth beside a busy host, which every file read disturbs
_PLENTY_BYTES = 2 << 30  # on top: more than other processes take in the 20 ms of populating a chunk
_VALID_SECONDS = 1.0  # pinning may pause for hours, while other processes take the memory


class Allowance:
    """Checks the limits for many chunks at a time, because that reads a dozen files. Used by the pinning thread."""

    def __init__(self, shortage: Callable[[int], Shortage | None], clock: Callable[[], float]) -> None:
        """`shortage(num_bytes)` returns why that much more memory does not fit, or None."""
        self._shortage, self._clock = shortage, clock
        self._end = 0
        self._valid_until = 0.0
        self.is_plenty = False
        """Memory is so far from every limit that touching pages cannot invoke the OOM killer."""

    def require(self, start: int, end: int) -> None:
        """Check that the pool's bytes from `start` to `end` fit. Raises `PinError` if not."""
        if end <= self._end and self._clock() < self._valid_until:
            return
        asked = max(end - start, _ASKED_BYTES)
        self.is_plenty = self._shortage(asked + _PLENTY_BYTES) is None
        if self.is_plenty or self._shortage(asked) is None:
            self._end, self._valid_until = start + asked, self._clock() + _VALID_SECONDS
        elif shortage := self._shortage(end - start):
            raise PinError(shortage.reason, f"the next chunk does not fit: {shortage.message}")

    def forget(self) -> None:
        """Check again next time."""
        self._end = 0
