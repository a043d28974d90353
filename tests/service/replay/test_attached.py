"""Replays as clients of a node service: engines and ranks in processes of their own, over the socket."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.launcher import EngineLauncher, EngineSpec
from kvstow_service.replay.result import AttachedResult
from kvstow_service.replay.trace import ReplayOptions, TraceRequest, even_shape

pytestmark = pytest.mark.process

MIB = 1 << 20
SLOT_BYTES = 16 << 10


class Service:
    """A node service in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._running = ExitStack()
        self.node: Node

    def start(self) -> None:
        settings = Settings(memory=64 * MIB, attach_socket=self.path, extent_size=16 * MIB)
        self.node = Node(settings)
        self.node.start()
        self._running.callback(self.node.close)

    def stop(self) -> None:
        self._running.close()

    @property
    def used_slots(self) -> int:
        return sum(pool.facade.stats().pool.slots.cached for pool in self.node.host.pools())

    def has_registered(self, pid: int) -> bool:
        """Whether the engine with this process id is attached, and its ranks have registered all memory of its pool."""
        capacity = {pool.name: pool.facade.desired().capacity_slots for pool in self.node.host.pools()}
        return any(
            one.pid == pid and one.state == "attached" and one.registered_slots >= capacity[one.pool]
            for one in self.node.host.sessions()
        )

    def pid_of_rank(self, engine: int, rank: int) -> int:
        (session,) = [one for one in self.node.host.sessions() if one.pid == engine]
        pid = session.ranks[rank].pid
        assert pid is not None
        return pid

    def wait_until_empty(self) -> None:
        eventually(lambda: not self.node.host.sessions())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path / "run" / "attach.sock")
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def requests(conversations: list[TraceRequest]) -> list[TraceRequest]:
    return conversations[:60]


def spec(service: Service, requests: list[TraceRequest], *, name: str = "replay-1", **given: Any) -> EngineSpec:
    options = ReplayOptions(concurrency=2)
    blocks = blocks_needed(requests, options.concurrency)
    found = EngineSpec(name, service.path, even_shape(SLOT_BYTES), 2, blocks, 0, requests, options)
    return replace(found, **given)


def endless(service: Service, requests: list[TraceRequest]) -> EngineSpec:
    """An engine that runs until the test stops it."""
    return spec(service, requests * 1000, options=ReplayOptions(concurrency=2, rate=40.0, drain_seconds=60.0))


def run(
    *specs: EngineSpec,
    stop: threading.Event | None = None,
    on_request: Callable[[int], None] = lambda finished: None,
    may_begin: Callable[[int], bool] | None = None,
) -> AttachedResult:
    found = EngineLauncher(specs, on_request=on_request, log=print, may_begin=may_begin).run(stop or threading.Event())
    print(found.to_json())
    return found


def assert_verified(found: AttachedResult, failed_loads: int = 0) -> None:
    total = found.total
    assert (total.mismatches, total.loaded.failed, total.abandoned) == (0, failed_loads, 0)
    assert total.verified_bytes == total.loaded.num_bytes == total.loaded.blocks * SLOT_BYTES * 2 > 0


def test_an_engine_finds_what_another_has_stored_and_shares_its_memory(
    service: Service, requests: list[TraceRequest]
) -> None:
    service.start()
    first = run(spec(service, requests), may_begin=service.has_registered)
    alone = service.used_slots
    both = run(spec(service, requests), spec(service, requests, name="replay-2"), may_begin=service.has_registered)
    assert_verified(first)
    assert_verified(both)
    assert 0 < first.total.block_hit_rate < both.total.block_hit_rate == 1.0
    assert 0 < service.used_slots <= 1.05 * alone
    assert both.total.stored.blocks == 0
    assert [engine.result.requests for engine in both.engines] == [60, 60]


@pytest.mark.parametrize(("victim", "end"), [("engine", "signal SIGKILL"), ("rank", "exit status 1")])
def test_an_engine_that_is_killed_or_loses_a_rank_comes_back_to_a_hot_cache(
    service: Service, requests: list[TraceRequest], victim: str, end: str
) -> None:
    service.start()
    run(spec(service, requests), may_begin=service.has_registered)
    stop = threading.Event()
    done = 0
    begun: list[tuple[int, int]] = []
    killed: list[int] = []

    def may_begin(pid: int) -> bool:
        if service.has_registered(pid):
            begun.append((pid, done))
        return service.has_registered(pid)

    def kill(finished: int) -> None:
        nonlocal done
        done = finished
        if not begun or finished < begun[-1][1] + 5:
            return
        if not killed:
            killed.append(begun[0][0] if victim == "engine" else service.pid_of_rank(begun[0][0], 1))
            os.kill(killed[0], signal.SIGKILL)
        elif len(begun) == 2:
            stop.set()

    found = run(endless(service, requests), stop=stop, on_request=kill, may_begin=may_begin)
    assert_verified(found)
    before, after = found.engines[0].lives
    assert (before.end, after.end) == (end, "finished")
    assert after.result.first_hit_blocks == after.result.first_blocks > 0
    assert after.result.hit_blocks == after.result.blocks
    service.wait_until_empty()


def test_a_replay_goes_on_without_the_service_and_attaches_when_it_comes(
    service: Service, requests: list[TraceRequest]
) -> None:
    stop = threading.Event()
    attached: list[int] = []

    def start(finished: int) -> None:
        if finished < 5:
            return
        if not hasattr(service, "node"):
            service.start()
        elif not attached and service.used_slots:
            attached.append(finished)
        elif attached and finished >= attached[0] + len(requests) + 5:  # all of them once more, and some find hits
            stop.set()

    found = run(endless(service, requests), stop=stop, on_request=start)
    assert_verified(found)
    engine = found.engines[0]
    assert (engine.sessions, engine.problem) == (1, None)
    assert engine.lives[0].seconds_without > 0
