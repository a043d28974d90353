"""A whole node over its socket, and engines over bare connections."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.node import rawengine
from tests.service.node.conftest import EngineProcess, Engines, MakeWholeNode
from tests.service.node.keepers import end_keeper, look
from tests.service.node.rawengine import SLOT_BYTES, key_of
from tests.service.node.wholenode import EXTENT, ample_memory
from tests.waiting import eventually

from kvstow.attach.calls import Hold
from kvstow.errors import ConflictError, KeeperError
from kvstow_service.node import node as node_module
from kvstow_service.node.node import Node
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools import noderecords
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import PoolSettings
from kvstow_service.node.settings import load_settings
from kvstow_service.node.survival.roster import Survivors, read_survivors

MIB = 1 << 20


@pytest.fixture
def make_node(make_whole_node: MakeWholeNode) -> MakeWholeNode:
    """They are started."""

    def make(*, paused: bool = False, **options: Any) -> Node:
        node = make_whole_node(**options)
        node.populator.set_paused(paused)
        node.start()
        return node

    return make


def test_no_session_is_detached_while_the_node_takes_up_what_an_earlier_one_has_left(
    make_whole_node: MakeWholeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def recover(*given: Any) -> Survivors:
        with pytest.raises(ConflictError) as refused:
            node.detach("s", kill=False)
        told.append(str(refused.value))
        return read_survivors(*given)

    monkeypatch.setattr(node_module, "read_survivors", recover)
    node = make_whole_node(state=tmp_path / "state")
    with pytest.raises(ConflictError, match="/startupz"):
        node.detach("s")
    node.start()
    assert [sentence.startswith("no session can be detached yet") for sentence in told] == [True]
    assert not node.detach("s")


def test_an_engine_that_is_killed_leaves_its_blocks_and_frees_the_rest(
    make_node: MakeWholeNode, engines: Engines, engine_process: EngineProcess
) -> None:
    node = make_node()
    killed = engine_process(node.settings.attach_path, 20)
    (session,) = node.sessions()
    assert (session.pid, session.state, session.in_flight) == (killed.pid, "attached", 1)
    killed.kill()
    eventually(lambda: not node.sessions())
    (hosted,) = node.pools()
    hosted.facade.check_integrity()
    slots = hosted.facade.stats().pool.slots
    assert (slots.cached, slots.filling, slots.quarantined, slots.leased) == (20, 0, 0, 0)
    engine = engines(node)
    keys = [key_of(number) for number in range(20)]
    engine.wait_for(lambda: engine.lookup(keys, Hold.NOTHING).leading == 20)
    assert engine.load(keys[:10]) == 10


def test_the_keeper_is_shown(make_node: MakeWholeNode, tmp_path: Path) -> None:
    assert make_node().memory().keeper is None
    folder = tmp_path / "state"
    node = make_node(state=folder)
    assert (node.memory().keeper, node.memory().keeper_restarts) == ("connected", 0)
    os.kill(look(folder).pid, signal.SIGKILL)
    eventually(lambda: node.memory().keeper_restarts == 1)
    assert node.memory().keeper == "connected"


def test_a_keeper_that_is_gone_is_no_lack_of_memory(
    make_node: MakeWholeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor would say what to do against a lack of memory, which ends with a restart."""

    def refuse(*_: object) -> None:
        raise KeeperError("no process is left")

    node = make_node(state=tmp_path / "state")
    monkeypatch.setattr(noderecords, "start_keeper", refuse)
    os.kill(look(tmp_path / "state").pid, signal.SIGKILL)
    eventually(lambda: node.memory().unsaved)
    memory = node.memory()
    assert (memory.keeper, memory.failure) == ("gone", None)
    assert "there is no keeper" in memory.unsaved[0]


def test_the_pace_of_populating_is_known_while_memory_comes(
    make_node: MakeWholeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, populated = FakeClock(), [0]
    node = make_node(clock=clock)
    status = node.populator.status()
    monkeypatch.setattr(node.populator, "status", lambda: status._replace(populated_bytes=populated[0]))
    node.tick()
    assert node.memory().populate_bytes_per_second is None
    for _ in range(3):
        clock.advance(1.0)
        populated[0] += 5 * MIB
        node.tick()
    assert node.memory().populate_bytes_per_second == 5 * MIB
    for _ in range(6):
        clock.advance(1.0)
        node.tick()
    assert node.memory().populate_bytes_per_second is None


def test_the_settings_reach_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[PoolSettings] = []

    class NotedHost(NodeHost):
        def __init__(self, memory: MemoryThread, *, settings: PoolSettings, clock: Callable[[], float]) -> None:
            noted.append(settings)
            super().__init__(memory, settings=settings, clock=clock)

    monkeypatch.setattr(node_module, "NodeHost", NotedHost)
    given = {"memory": "65MiB", "extent_size": "4MiB", "policy": "lru", "curve": "false", "transfer_timeout": "9s"}
    node = Node(load_settings(given, {}))
    assert (node.memory_thread.budget.total_bytes, node.memory_thread.budget.extent_bytes) == (64 * MIB, 4 * MIB)
    assert noted == [PoolSettings("lru", curve=False, transfer_timeout=9.0)]
    node.close()


def test_an_engine_is_answered_before_there_is_memory(make_node: MakeWholeNode, engines: Engines) -> None:
    node = make_node(paused=True)
    engine = engines(node)
    assert engine.lookup([key_of(0)]).runs == ()
    (session,) = node.sessions()
    assert session.state == "attaching"
    assert node.memory().target_bytes == 8 * EXTENT
    node.populator.set_paused(False)
    engine.store_all([key_of(0)])
    engine.wait_for(lambda: node.memory().populated_bytes == 8 * EXTENT)
    assert node.memory().failure is None
    (pool,) = node.pools()
    assert (pool.name, pool.model, pool.is_resizable) == (engine.welcome.pool, "org/Model-1", False)
    assert pool.max_capacity_slots == 8 * EXTENT // (2 * SLOT_BYTES)
    assert node.find_pool(pool.name) == pool
    assert node.find_pool("other") is None


def test_an_operator_ends_a_session(make_node: MakeWholeNode, engine_process: EngineProcess) -> None:
    node = make_node()
    running = engine_process(node.settings.attach_path, 1)
    (session,) = node.sessions()
    assert not node.detach("unknown", kill=True)
    assert node.detach(session.id, kill=False)
    eventually(lambda: [one.state for one in node.sessions()] == ["lost"])
    (pool,) = node.pools()
    assert pool.facade.stats().pool.slots.quarantined == 1
    with pytest.raises(ConflictError, match="detach them first"):
        node.delete_pool(pool.name)
    running.kill()
    eventually(lambda: not node.sessions())
    node.delete_pool(pool.name)
    assert node.pools() == []
    eventually(lambda: node.memory_thread.figures.spare_bytes == 8 * EXTENT)


def test_closing_leaves_no_thread_no_socket_and_no_memory(make_node: MakeWholeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node)
    engine.store_all([key_of(0)])
    threads = {thread.name for thread in threading.enumerate()}
    assert {"kvstow-attach", "kvstow-memory", "kvstow-populate"} <= threads
    engine.workers[0].holds_revoked = True
    node.close()
    assert not {"kvstow-attach", "kvstow-memory", "kvstow-populate"} & {one.name for one in threading.enumerate()}
    assert not node.settings.attach_path.exists()
    engine.wait_for(lambda: engine.scheduler.state != "attached")
    assert engine.workers[0].read(0) == rawengine.content_of(key_of(0), 0), "a mapping stays until its process lets go"
    engine.wait_for(lambda: bool(engine.workers[0].revoked))  # it was asked to let go
    engine.wait_for(lambda: not engine.workers[1].maps)


def test_a_thread_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch, make_node: MakeWholeNode, tmp_path: Path) -> None:
    failures: list[str] = []
    state = tmp_path / "state"
    node = make_node(on_failure=failures.append, state=state)
    assert node.live_failure() is None
    monkeypatch.setattr(node.memory_thread, "run_pending", lambda: 1 / 0)
    node.memory_thread.look_again()
    eventually(lambda: failures)
    assert (
        node.live_failure()
        == failures[0]
        == "the thread of the node's memory has failed: ZeroDivisionError('division by zero')"
    )
    node.close()  # for the keeper: to give memory back, it would wait for the thread that no longer answers
    end_keeper(state)


def test_a_defect_in_one_change_of_memory_is_seen_and_ends_nothing(
    make_node: MakeWholeNode, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    with monkeypatch.context() as patch:
        patch.setattr(node.memory_thread.memory, "retry", lambda: 1 / 0)
        node.memory_thread.do(node.memory_thread.memory.retry)
        eventually(lambda: node.memory_failure() is not None)
    assert node.memory_failure() == "1 changes of the node's memory failed by a defect; the log says which"
    engines(node).store_all([key_of(0)])
    assert node.live_failure() is None


def test_refused_memory_is_shown_and_tried_again(make_node: MakeWholeNode, tmp_path: Path) -> None:
    clock = FakeClock()
    node = make_node(clock=clock, paused=True)
    (tmp_path / "meminfo").write_text("MemAvailable: 0 kB\n")
    node.populator.set_paused(False)
    eventually(lambda: node.memory_failure() is not None)
    assert node.memory().failure == node.memory_failure()
    ample_memory(tmp_path)
    clock.advance(11.0)
    node.tick()
    eventually(lambda: node.populator.status().state == "ready")
    assert node.memory_failure() is None


def test_records_are_checked_once_a_minute(make_node: MakeWholeNode, engine_process: EngineProcess) -> None:
    clock = FakeClock()
    node = make_node(clock=clock)
    engine = engine_process(node.settings.attach_path, 1)
    (pool,) = node.host.pools()
    pool.index.slot_keys.key_of[5] = b"nobody's"
    clock.advance(61.0)
    node.tick()
    assert node.live_failure() is None, "a session waits for the pool's lock"
    engine.kill()
    eventually(lambda: not node.host.sessions())
    clock.advance(61.0)
    node.tick()
    failure = node.live_failure()
    assert failure is not None
    assert failure.startswith(f"the records of pool {pool.name} are inconsistent")


def test_the_descriptor_limit_is_raised(make_node: MakeWholeNode) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        make_node()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
