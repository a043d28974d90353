"""Measures what the doctor reports and what would block the event loop: the memory of the host, memory that earlier
services have left in it, and the store below the pools. Also compares the clocks of ranks with the server's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from starlette.concurrency import run_in_threadpool

from kvstow_api.directory import HostMemory, OrphanedMemory, TierMeasurements
from kvstow_api.host import ApiHost

logger = logging.getLogger("kvstow.api")

INTERVAL = 10.0
"""The time between two measurements of the host's memory, in seconds."""
_RARELY = 6
"""One in this many measurements also includes the rest, which reads files of all processes, and resolves names."""

_T = TypeVar("_T")


class Measured(NamedTuple):
    """The last measurements. They are None before the first one, if nothing is measured, and after a failure."""

    memory: HostMemory | None = None
    orphans: Sequence[OrphanedMemory] | None = None
    tier: TierMeasurements | None = None

    @property
    def orphaned_bytes(self) -> int | None:
        return None if self.orphans is None else sum(one.num_bytes for one in self.orphans)


class HostWatch:
    """Measures the host on a thread. Used on the event loop."""

    def __init__(self, host: ApiHost, renew_tokens: Callable[[], object] = lambda: None) -> None:
        """`renew_tokens` reads the token files, so that an unusable one is reported even while no request has a
        token."""
        self.measured, self._renew_tokens = Measured(), renew_tokens
        self._host = host
        self._failing: set[str] = set()
        self._looked = float("-inf")
        self._measuring = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            for looks in count():
                try:
                    await self._renew(at_all=looks % _RARELY == 0)
                except Exception:  # for example, no thread could be started; the next measurement may succeed
                    logger.exception("measuring the host failed")
                await asyncio.sleep(INTERVAL)
        finally:
            if self._look is not None:
                self._look.cancel()

    async def look(self, *, max_age: float = 0.0) -> None:
        """Measure everything now, unless the last such measurement ended less than `max_age` seconds ago.

        Callers share the measurement that is in progress. So they occupy one thread, however many there are, and none
        waits for a measurement that others have started after its own.
        """
        if self._host.clock() - self._looked < max_age:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._renew(at_all=True))
        await asyncio.shield(self._look)  # a caller that is cancelled does not end it for the others

    async def _renew(self, *, at_all: bool) -> None:
        async with self._measuring:
            self.measured = await run_in_threadpool(self._measure, at_all)
        if at_all:
            self._looked = self._host.clock()

    def _measure(self, at_all: bool) -> Measured:
        host, tier = self._host, self._host.directory.tier
        self._try("the token files", self._renew_tokens)
        memory = None if host.host_memory is None else self._try("memory of the host", host.host_memory)
        if not at_all:
            return self.measured._replace(memory=memory)
        orphans = self._try("orphaned memory", host.orphaned_memory)
        return Measured(memory, orphans, None if tier is None else self._try("the tier's store", tier.measure))

    def _try(self, what: str, measure: Callable[[], _T]) -> _T | None:
        try:
            found = measure()
        except Exception:  # the next measurement may succeed
            if what not in self._failing:
                logger.exception("measuring %s failed", what)
            self._failing.add(what)
            return None
        self._failing.discard(what)
        return found


class RankClocks:
    """Differences between the server's clock and those of ranks on other hosts, from their last reports. Used on the
    event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._offsets: dict[int, float] = {}

    def note(self, rank: int, sent: float) -> None:
        """Record the time that rank `rank` sent, in seconds since 1970."""
        self._offsets[rank] = sent - self._now()

    def offsets(self) -> Mapping[int, float]:
        """Return how far each rank's clock is ahead of the server's, in seconds, less the time that its report took."""
        return dict(self._offsets)
