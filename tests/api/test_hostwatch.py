"""Measurements for the doctor: its callers share them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.concurrency import run_in_threadpool
from tests.api.conftest import Eventually
from tests.doubles.fakes import FakeClock

from kvstow.control.engine import OffloadEngine
from kvstow_api import hostwatch
from kvstow_api.directory import EmbeddedDirectory, OrphanedMemory
from kvstow_api.host import ApiHost
from kvstow_api.hostwatch import HostWatch

pytestmark = pytest.mark.anyio


class Measuring:
    """A measurement that lasts until `go_on`."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = threading.Event()

    def __call__(self) -> Sequence[OrphanedMemory]:
        self.begun += 1
        assert self.go_on.wait(30)
        return [OrphanedMemory(1, "found", 1, self.begun)]


@pytest.fixture
def measuring() -> Measuring:
    return Measuring()


def make_watch(engine: OffloadEngine, measuring: Measuring, clock: FakeClock) -> HostWatch:
    directory = EmbeddedDirectory(engine, 16)
    return HostWatch(ApiHost(directory, version="1", mode="test", orphaned_memory=measuring, clock=clock))


async def test_all_who_wait_share_one_measurement(engine: OffloadEngine, measuring: Measuring) -> None:
    watch = make_watch(engine, measuring, FakeClock(0.0))
    waiting = [asyncio.create_task(watch.look()) for _ in range(100)]
    await asyncio.sleep(0)  # all have asked
    waiting[0].cancel()  # the one that began it has gone
    await asyncio.sleep(0)
    measuring.go_on.set()
    await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()
    assert measuring.begun == 1
    await watch.look()
    assert (measuring.begun, watch.measured.orphaned_bytes) == (2, 2), "later ones measure anew"


async def test_a_recent_measurement_is_enough_for_those_who_accept_it(
    engine: OffloadEngine, measuring: Measuring
) -> None:
    clock = FakeClock(0.0)
    watch = make_watch(engine, measuring, clock)
    measuring.go_on.set()
    await watch.look(max_age=1.0)
    clock.advance(0.9)
    await watch.look(max_age=1.0)
    assert measuring.begun == 1
    clock.advance(0.2)
    await watch.look(max_age=1.0)
    assert measuring.begun == 2


async def test_a_look_that_fails_is_not_the_last_one(
    engine: OffloadEngine,
    measuring: Measuring,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = make_watch(engine, measuring, FakeClock(0.0))
    measuring.go_on.set()
    failures = [RuntimeError("can't start new thread")]

    async def run(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return await run_in_threadpool(*given)

    async def has_measured() -> bool:
        return measuring.begun > 0

    monkeypatch.setattr(hostwatch, "run_in_threadpool", run)
    monkeypatch.setattr(hostwatch, "INTERVAL", 0.0)
    task = asyncio.create_task(watch.run())
    await eventually(has_measured)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "measuring the host failed" in caplog.text


@pytest.mark.parametrize(("caller", "measured"), [(None, 1), (1234, 4)])
async def test_only_those_who_may_change_things_measure_anew_each_time(
    launch: Any, measuring: Measuring, caller: int | None, measured: int
) -> None:
    measuring.go_on.set()
    client = await launch(orphaned_memory=measuring, caller=caller)
    await launch.state.watch.look()  # the fixture's clock stands still
    before = measuring.begun
    for _ in range(3):
        assert (await client.get("/v1/doctor")).status_code == 200
    assert measuring.begun - before == measured - 1
