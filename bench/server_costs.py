"""What the admin server costs its process: `python -m bench.server_costs`. Everything runs on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median

import httpx
from fastapi import FastAPI

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import RankReport
from kvstow.testing.rank import ready_report
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost

_RANKS, _SLOTS, _SLOT_BYTES = 8, 1024, 4096
_REPEATS = 100
_WATCHED_SECONDS = 10.0
_ASKED = ("/livez", "/readyz", "/v1/stats", "/v1/info")  # before the scrape that is measured


def main() -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=_SLOTS, num_ranks=_RANKS))
    reports = [ready_report(_SLOT_BYTES, _SLOTS, rank=rank) for rank in range(_RANKS)]
    for report in reports:
        engine.report(report)
    message = reports[0].to_json()
    print(f"read a rank's report: {_median_us(lambda: RankReport.from_json(message)):.1f} us")
    asyncio.run(_measure(engine))


async def _measure(engine: OffloadEngine) -> None:
    app = create_app(ApiHost(directory=EmbeddedDirectory(engine, _SLOTS), version="bench", mode="bench"))
    async with _client(app) as client:
        with _lags() as lags:
            await asyncio.sleep(0.01)  # it looks
            await client.get("/openapi.json")
            await asyncio.sleep(0.01)
        print(f"/openapi.json, the first time: the event loop was late by {max(lags) * 1e3:.1f} ms")
        for path in _ASKED:
            await client.get(path)
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            scrape = await client.get("/metrics")
            seconds.append(time.perf_counter() - started)
        series = [line for line in scrape.text.splitlines() if not line.startswith("#")]
        http = sum(line.startswith("kvstow_http_") for line in series)
        size = f"{len(scrape.content) / 1000:.0f} kB, {len(series)} series, {http} of them of HTTP"
        print(f"/metrics: {median(seconds) * 1e3:.2f} ms, {size}")
        idle = await _cpu_ms_per_second()
        for viewers in (1, 16):
            tasks = [asyncio.create_task(_view(app)) for _ in range(viewers)]
            await asyncio.sleep(1.0)  # they have the whole page
            spent = await _cpu_ms_per_second()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            print(f"status page, {viewers} viewers: {spent - idle:.2f} ms of CPU a second beside {idle:.2f}")


@asynccontextmanager
async def _client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kvstow") as client,
    ):
        yield client


@contextmanager
def _lags() -> Iterator[list[float]]:
    """How late the event loop was, look by look, within the context."""
    lags: list[float] = []

    async def look() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - started - 0.001)

    task = asyncio.create_task(look())
    try:
        yield lags
    finally:
        task.cancel()


async def _view(app: FastAPI) -> None:
    async for _ in app.state.page.open():
        pass


async def _cpu_ms_per_second() -> float:
    started = time.process_time()
    await asyncio.sleep(_WATCHED_SECONDS)
    return (time.process_time() - started) * 1e3 / _WATCHED_SECONDS


def _median_us(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


if __name__ == "__main__":
    main()
