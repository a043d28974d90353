"""The order in which unauthenticated requests begin."""

from __future__ import annotations

import asyncio
from collections import deque

_PER_ITERATION = 4


class RequestQueue:
    """Lets four requests begin per iteration of the event loop. Not thread-safe.

    A flood brings hundreds of requests in one iteration, and a new connection needs several iterations until its
    request is read, so a probe would wait for hundreds of requests several times. Probes go first, but one of the four
    is another request if one waits: a flood of probes does not lock the operator out.
    """

    def __init__(self) -> None:
        self._probes: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self, *, probe: bool) -> None:
        """Returns when the request may begin."""
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        (self._probes if probe else self._others).append(admitted)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._admit, loop)
        await admitted

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in range(_PER_ITERATION):
            queue = (self._others or self._probes) if number == 0 else (self._probes or self._others)
            if queue:
                admitted = queue.popleft()
                if not admitted.done():  # its request was cancelled
                    admitted.set_result(None)
        self._scheduled = bool(self._probes or self._others)
        if self._scheduled:
            loop.call_soon(self._admit, loop)
