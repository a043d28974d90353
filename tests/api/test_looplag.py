from __future__ import annotations

import asyncio
import time

import pytest

from kvstow_api.health import LoopMonitor

pytestmark = pytest.mark.anyio


async def test_a_stall_is_reported_afterwards() -> None:
    monitor = LoopMonitor(allowed=0.05)
    task = asyncio.create_task(monitor.run())
    try:
        assert monitor.failure() is None
        await asyncio.sleep(0)  # the monitor goes to sleep
        time.sleep(0.4)  # what a route must never do
        while not sum(monitor.snapshot().counts):
            await asyncio.sleep(0.001)
        assert "the event loop was" in (monitor.failure() or "")
    finally:
        task.cancel()


def test_an_old_stall_is_forgotten() -> None:
    monitor = LoopMonitor()
    monitor.record(2.0)
    assert monitor.failure() == "in the last 5 s, the event loop was 2.00 s late (allowed: 1 s)"
    for _ in range(20):
        monitor.record(0.0)
    assert monitor.failure() is None
    assert sum(monitor.snapshot().counts) == 21


async def test_a_monitor_that_stopped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = LoopMonitor()

    def broken(lag: float) -> None:
        raise RuntimeError(lag)

    monkeypatch.setattr(monitor, "record", broken)
    with pytest.raises(RuntimeError):
        await monitor.run()
    assert monitor.failure() == "the measurement of the event loop has stopped"
