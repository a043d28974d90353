"""The order in which unauthenticated requests begin."""

from __future__ import annotations

import asyncio
from collections import deque

_PER_TURN = 4


class RequestQueue:
    """Lets four requests begin in each turn of the event loop. Used on one event loop.

    A flood brings hundreds of requests in one turn, and a new connection needs several turns until its request is
    read: a probe would wait for all of them again and again. Probes go first, but one of the four is another request,
    if there is one, so that a flood of probes does not keep the operator out.
    """

    def __init__(self) -> None:
        self._probes: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self, *, probe: bool) -> None:
        """Returns when the request may begin."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        (self._probes if probe else self._others).append(turn)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._admit, loop)
        await turn

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in range(_PER_TURN):
            queue = (self._others or self._probes) if number == 0 else (self._probes or self._others)
            if queue:
                turn = queue.popleft()
                if not turn.done():  # else its request was cancelled
                    turn.set_result(None)
        self._scheduled = bool(self._probes or self._others)
        if self._scheduled:
            loop.call_soon(self._admit, loop)
