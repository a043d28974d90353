"""In which order requests of strangers begin."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvstow_service.admin.server import RequestQueue

pytestmark = pytest.mark.anyio


class Requests:
    """Requests of one queue, and the turn of the event loop in which each of them began."""

    def __init__(self) -> None:
        self._queue = RequestQueue()
        self.begun: list[str] = []

    def send(self, name: str, count: int = 1, *, probe: bool = False) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._run(name, probe)) for _ in range(count)]

    async def _run(self, name: str, probe: bool) -> None:
        await self._queue.wait(probe=probe)
        self.begun.append(name)


async def test_few_requests_begin_per_iteration() -> None:
    requests = Requests()
    tasks = requests.send("other", 20)
    most = before = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most, before = max(most, len(requests.begun) - before), len(requests.begun)
    assert most == 4


async def test_a_probe_overtakes_waiting_requests() -> None:
    requests = Requests()
    tasks = requests.send("other", 100)
    while not requests.begun:
        await asyncio.sleep(0)
    tasks += requests.send("probe", probe=True)
    await asyncio.gather(*tasks)
    assert requests.begun.index("probe") < 20


async def test_a_flood_of_probes_lets_others_through() -> None:
    requests = Requests()
    tasks = [*requests.send("probe", 100, probe=True), *requests.send("other", 2)]
    await asyncio.gather(*tasks)
    assert [place for place, name in enumerate(requests.begun) if name == "other"][-1] < 12
    assert len(requests.begun) == 102


async def test_a_cancelled_request_does_not_block_others() -> None:
    requests = Requests()
    cancelled, *tasks = requests.send("other", 10)
    await asyncio.sleep(0)
    cancelled.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    await asyncio.gather(*tasks)
    assert len(requests.begun) == 9
