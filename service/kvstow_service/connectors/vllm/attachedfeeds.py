"""What an attached engine reports besides its transfers: the blocks in the service's pool, for its KV events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvstow.attach.calls import EventPage, Hold
from kvstow.attach.connection import Answer
from kvstow.attach.engine import Hits
from kvstow_service.connectors.engine_core.kvevents import BlockNews
from kvstow_service.connectors.vllm.attachedcontrol import AttachedControl

PERIOD_SECONDS = 0.1
"""The interval at which the service is asked what others have stored and what was removed. The service is asked about
own stores at once."""

logger = logging.getLogger("kvstow.vllm")


class AttachedBlocks:
    """A `BlockSource` that asks the node service for the events of the session's namespace, one page at a time. Used by
    the scheduler's thread.

    A new session reads from the oldest event that the service keeps, so it also learns what other engines have stored
    lately. What a session has reported is void when the session ends, and after a reset.
    """

    def __init__(
        self,
        control: AttachedControl,
        has_all_memory: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_all_memory`: whether the ranks can load every block of the pool. Before that, blocks that are present
        may not be found."""
        self._control, self._has_all_memory, self._clock = control, has_all_memory, clock
        self._life = control.life
        self._asked: Answer[EventPage] | None = None
        self._cursor = 0
        self._has_more = False
        self._due = clock()
        self._stored = 0  # own blocks, when the service was last asked

    @property
    def is_behind(self) -> bool:
        """Whether steps are needed to learn that an own store has ended, or to read more known events."""
        if not self._control.is_attached:
            return False
        return self._asked is not None or self._has_more or self._stored != self._control.moved_blocks["store"]

    def read(self) -> BlockNews:
        life, control = self._life, self._control
        if control.life != life:
            self._life, self._asked, self._cursor, self._has_more = control.life, None, 0, True
            if life.session:
                return BlockNews(gone=True)
        news = self._take_page()
        if self._asked is None and control.is_attached and (self.is_behind or self._clock() >= self._due):
            self._due = self._clock() + PERIOD_SECONDS
            self._stored = control.moved_blocks["store"]
            self._asked = control.read_events(self._cursor)
        return news

    def look_up(self, keys: Sequence[bytes]) -> _Presence | None:
        if not self._control.finds_hits or not self._has_all_memory():
            return None
        return _Presence(len(keys), self._control.find(keys, hold=Hold.NOTHING, count=False))

    def _take_page(self) -> BlockNews:
        if self._asked is None or not self._asked.done:
            return BlockNews()
        page, self._asked = self._asked.value, None
        self._cursor, self._has_more = page.cursor, page.has_more
        return BlockNews(page.changes, page.lost)


class _Presence:
    """The answer to a lookup, key by key."""

    def __init__(self, num_keys: int, found: Answer[Hits]) -> None:
        self._num_keys, self._found = num_keys, found

    @property
    def done(self) -> bool:
        return self._found.done

    @property
    def error(self) -> str | None:
        return self._found.error

    @property
    def value(self) -> list[bool]:
        present = [False] * self._num_keys
        for first, length in self._found.value.runs:
            present[first : first + length] = [True] * length
        return present
