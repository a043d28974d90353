"""Callers without a credential get a bounded share of the interpreter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.doubles.fakes import FakeClock

from kvstow_api.auth import ACTOR
from kvstow_api.middleware import AnonymousMiddleware, TimeAllowance

pytestmark = pytest.mark.anyio


class Bench:
    """The middleware before an application that computes for `seconds`, in two steps. Waiting advances the clock."""

    def __init__(self, seconds: float) -> None:
        self.clock, self._cpu, self._seconds = FakeClock(), FakeClock(), seconds
        self.waited: list[float] = []
        self.answered = 0
        self.app = AnonymousMiddleware(self._answer, clock=self.clock, cpu_clock=self._cpu, sleep=self._wait)

    async def ask(self, path: str = "/v1/info", actor: str = "anonymous") -> int:
        """The status."""
        found: list[Any] = []

        async def send(message: Any) -> None:
            found.append(message)

        await self.app({"type": "http", "path": path, "headers": [], ACTOR: actor}, self._never, send)
        status: int = found[0]["status"]
        assert status == 200 or (b"retry-after", b"1") in found[0]["headers"]
        return status

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._cpu.advance(self._seconds / 2)
        await asyncio.sleep(0)
        self._cpu.advance(self._seconds / 2)
        self.answered += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def _wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.clock.advance(seconds)

    async def _never(self) -> Any:
        raise AssertionError("nobody reads the request")


async def test_a_flood_gets_its_share_and_is_told_when_to_come_back() -> None:
    bench = Bench(0.2)
    statuses = [await bench.ask() for _ in range(100)]
    assert statuses[:3] == [200, 200, 200]  # what was saved up
    assert set(statuses) == {200, 503}
    assert max(bench.waited) <= 1.0
    used = bench.answered * 0.2
    assert used <= 0.5 + 0.05 * sum(bench.waited) + 0.2  # the last one may owe


async def test_probes_and_metrics_have_an_allowance_of_their_own() -> None:
    bench = Bench(0.2)
    while await bench.ask() == 200:
        pass
    for path in ("/livez", "/readyz/loop", "/metrics"):
        before = len(bench.waited)
        assert await bench.ask(path) == 200
        assert len(bench.waited) == before


async def test_callers_with_a_credential_are_not_counted() -> None:
    bench = Bench(10.0)
    for actor in ("admin", "viewer", "uid:0", "certificate:ops"):
        assert [await bench.ask(actor=actor) for _ in range(3)] == [200, 200, 200]
    assert bench.waited == []
    assert await bench.ask() == 200


async def test_what_waits_costs_nothing_and_a_cancelled_request_ends() -> None:
    """A stream computes now and then; only that counts."""
    cpu, clock = FakeClock(), FakeClock()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    app = AnonymousMiddleware(stream, clock=clock, cpu_clock=cpu, sleep=lambda seconds: pytest.fail("it waits"))
    for _ in range(2):  # the second one would owe what the first one had cost
        begun.clear()
        task = asyncio.ensure_future(app({"type": "http", "path": "/v1/events", ACTOR: "anonymous"}, Any, Any))  # type: ignore[arg-type]
        await begun.wait()
        cpu.advance(100.0)  # of other requests
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended.is_set()
        assert task.cancelled()


def test_an_allowance_is_filled_up_to_its_bound() -> None:
    clock = FakeClock()
    allowance = TimeAllowance(0.5, 1.0, clock)
    allowance.use(2.0)
    assert allowance.seconds_owed == 2.0
    clock.advance(2.0)
    assert allowance.seconds_owed == 0.0
    clock.advance(100.0)
    allowance.use(1.5)
    assert allowance.seconds_owed == 1.0
