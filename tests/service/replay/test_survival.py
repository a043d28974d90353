"""A replay and a `kvstow serve` that is killed under its traffic, in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstow_service.demo.processes import DEADLINE_SECONDS, Service, wait_until
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.launcher import EngineLauncher, EngineSpec
from kvstow_service.replay.result import AttachedResult
from kvstow_service.replay.trace import ReplayOptions, TraceRequest, even_shape

pytestmark = pytest.mark.process


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the checkout need not be installed
    service = Service(tmp_path, "64MiB", ("--extent-size", "8MiB"))
    try:
        yield service
    finally:
        service.close()


def replay(
    service: Service,
    requests: list[TraceRequest],
    options: ReplayOptions,
    on_request: Callable[[int], None] = lambda finished: None,
    stop: threading.Event | None = None,
) -> AttachedResult:
    """To the end, or until `stop`."""
    blocks = blocks_needed(requests, options.concurrency)
    spec = EngineSpec("replay-1", service.socket, even_shape(16 << 10), 2, blocks, 0, requests, options)
    launcher = EngineLauncher([spec], log=print, on_request=on_request, may_begin=service.has_registered)
    found = launcher.run(stop or threading.Event())
    print(found.to_json())
    assert (found.total.mismatches, found.total.abandoned) == (0, 0)
    assert stop is not None or found.total.requests == len(requests)
    assert found.total.verified_bytes == found.total.loaded.num_bytes
    return found


def test_the_cache_outlives_a_service_that_is_killed_under_traffic(
    service: Service, conversations: list[TraceRequest]
) -> None:
    requests = conversations[:60]
    killed: list[int] = []
    attached: list[int] = []
    stop = threading.Event()

    def kill(finished: int) -> None:
        if finished < 10:
            return
        if not killed:
            killed.append(finished)
            service.kill()
            service.start()
        elif not attached and has_sessions(service):
            attached.append(finished)
        elif attached and finished >= attached[0] + 10:
            stop.set()

    service.start()
    wait_until(lambda: service.answers("/readyz"), "the service is healthy")
    cold = replay(service, requests, ReplayOptions())
    endless, paced = requests * 1000, ReplayOptions(concurrency=2, rate=20.0, drain_seconds=DEADLINE_SECONDS)
    during = replay(service, endless, paced, kill, stop)
    after = replay(service, requests, ReplayOptions())
    assert cold.total.block_hit_rate < 1
    assert (during.engines[0].sessions, during.engines[0].problem) == (2, None)
    assert after.total.block_hit_rate == 1
    assert after.total.stored.blocks == 0


def has_sessions(service: Service) -> bool:
    return service.answers("/readyz") and any(
        session["state"] == "attached" for session in service.get("/v1/sessions")["items"]
    )


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
def test_an_engine_that_stands_still_for_a_minute_harms_nobody(
    service: Service, conversations: list[TraceRequest]
) -> None:
    """Its processes are stopped in the middle of their transfers, and others share the pool meanwhile. Then it
    continues, and what it says and writes late is what it was allowed to."""
    requests = conversations[:60]
    others: list[AttachedResult] = []

    def stop(finished: int) -> None:
        if finished < 10 or others:
            return
        (session,) = service.get("/v1/sessions")["items"]
        until = time.monotonic() + 60
        with stopped([session["pid"], *(rank["pid"] for rank in session["ranks"])]):
            while time.monotonic() < until:
                others.append(replay(service, requests, ReplayOptions()))
            assert service.answers("/livez")

    service.start()
    wait_until(lambda: service.answers("/readyz"), "the service is healthy")
    found = replay(service, requests, ReplayOptions(concurrency=4), stop)
    assert others[-1].total.block_hit_rate == 1
    assert found.engines[0].problem is None
    wait_until(lambda: service.get("/v1/sessions")["items"] == [], "all sessions are over")
    slots = service.get("/v1/pools")["items"][0]["slots"]
    assert (slots["leased"], slots["filling"], slots["quarantined"]) == (0, 0, 0)
