"""Lookups that wait because their engine is about to register the memory of the blocks that they have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MOST_SECONDS = 1.0
TOKENS_PER_SECOND = 16_000
"""A lookup is worth waiting for as long as it would take to compute the tokens at this speed, which is that of an 8B
model on an H200."""
STALLED_SECONDS = 1.0
"""Registering counts as stalled if no slot was added for this long."""
MOST_WAITING = 256


class _Wait(NamedTuple):
    end: int
    until: float
    answer: Callable[[], object]


class MemoryWaits:
    """The lookups of one session that wait for memory. An engine that restarts takes seconds to register 40 GiB.
    Without waiting, its first request would find nothing and be computed, which slows registering down.

    Used only by the attach server's thread. The owner calls `expire` at `next_deadline`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots = 0
        self._grown_at = clock()
        self._rate: float | None = None
        self._waiting: list[_Wait] = []
        self.next_deadline: float | None = None
        """When the first wait is over. None if there is none."""

    def put(self, end: int, tokens: int, answer: Callable[[], object]) -> bool:
        """Call `answer` once all slots below `end` are registered, or the time is over that computing `tokens` takes.
        Returns False, and never calls it, if registering has stalled or would take more than twice as long. `answer`
        must not raise."""
        now = self._clock()
        seconds = min(MOST_SECONDS, tokens / TOKENS_PER_SECOND)
        if len(self._waiting) >= MOST_WAITING or now - self._grown_at > STALLED_SECONDS:
            return False
        if self._rate is not None and end - self._slots > 2 * seconds * self._rate:
            return False
        self._waiting.append(_Wait(end, now + seconds, answer))
        self._note_deadline()
        return True

    def advance(self, slots: int) -> None:
        """All ranks have registered this many slots. Answers the lookups that have waited for these slots."""
        now = self._clock()
        if slots > self._slots:
            seconds = now - self._grown_at
            if self._slots and seconds > 0:  # the first slots come after the mapping
                self._rate = (slots - self._slots) / seconds
            self._grown_at = now
        self._slots = slots
        self.expire()

    def expire(self) -> None:
        """Answer the lookups that have waited long enough, and those whose memory is registered. O(1) without any."""
        if not self._waiting:
            return
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        over = list[_Wait]()
        for wait in waiting:
            (over if wait.end <= self._slots or wait.until <= now else self._waiting).append(wait)
        self._note_deadline()
        for wait in over:
            wait.answer()

    def _note_deadline(self) -> None:
        self.next_deadline = min((wait.until for wait in self._waiting), default=None)
