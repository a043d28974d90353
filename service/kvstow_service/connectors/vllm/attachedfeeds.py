"""What an attached engine reports besides its transfers: the blocks in the service's pool for its KV events, and how
fast it computes prompts."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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
            self._begin_life()
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

    def _begin_life(self) -> None:
        self._life = self._control.life
        self._asked, self._cursor, self._has_more = None, 0, True

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


LEAST_TOKENS = 256
"""How many prompt tokens a step must compute to show the speed. If a step can have fewer than twice as many tokens,
half of its limit is enough."""
_WEIGHT = 0.2
"""The weight of the newest step that only decodes."""
_LEAST_SHARE = 0.5
"""The least share of its time with which a step that also decodes counts."""


class ScheduledStep(Protocol):
    """The part of vLLM's `SchedulerOutput` that is read. Its `scheduled_spec_decode_tokens` are drafts."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...


class PrefillSpeed(NamedTuple):
    """How many prompt tokens were computed, and in how many seconds."""

    tokens: int
    seconds: float


class _Planned(NamedTuple):
    number: int
    at: float
    prefill: int
    decode: int


class PrefillMeter:
    """Times the steps that compute prompts. Used by the scheduler's thread.

    Tokens that were loaded or found on the GPU are not computed, and do not count. A step begins when it is planned. If
    vLLM plans ahead, it begins when the step before it has ended. From the time of a step that also decodes, the time
    of a step that only decodes is subtracted. Steps of few tokens take as long as their launch, so they are ignored.
    """

    def __init__(self, least_tokens: int, clock: Callable[[], float]) -> None:
        self._least_tokens, self._clock = least_tokens, clock
        self._planned: deque[_Planned] = deque()
        self._last_end = 0.0
        self._decode_seconds = 0.0

    def planned(self, number: int, step: ScheduledStep) -> None:
        """Steps have ascending numbers. O(1) if all requests decode, otherwise O(requests of the step)."""
        scheduled = step.num_scheduled_tokens
        if not scheduled:
            return
        drafts: Mapping[str, Any] = getattr(step, "scheduled_spec_decode_tokens", None) or {}
        total = getattr(step, "total_num_scheduled_tokens", None)
        prefill = 0
        if total != len(scheduled):
            total = sum(scheduled.values())
            prefill = sum(
                [count for name, count in scheduled.items() if count > 1 + (len(drafts.get(name, ())) if drafts else 0)]
            )
        self._planned.append(_Planned(number, self._clock(), prefill, total - prefill))

    def ended(self, number: int) -> PrefillSpeed | None:
        """The step has ended. Returns what it shows about the speed of prefill."""
        now, planned = self._clock(), self._planned
        while planned and planned[0].number < number:
            planned.popleft()
        if not planned or planned[0].number != number:
            return None
        step = planned.popleft()
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        if not step.prefill:
            known = self._decode_seconds
            self._decode_seconds = (1 - _WEIGHT) * known + _WEIGHT * seconds if known else seconds
            return None
        if step.decode:
            seconds = max(seconds - self._decode_seconds, _LEAST_SHARE * seconds)
        return PrefillSpeed(step.prefill, seconds) if step.prefill >= self._least_tokens else None
