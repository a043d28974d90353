"""A node is killed, and the next one has its memory, its index and its sessions, which engines still use."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.service.node import rawengine, restartclient
from tests.service.node.noderunner import EXTENT_BYTES, RunningNode
from tests.service.node.rawengine import RawEngine, key_of
from tests.service.node.survival.test_survival import end_keeper

from kvstow.attach.calls import Hold
from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeperclient import KeeperClient
from kvstow_service.node.survival.orphanedmemory import find_orphaned_memory

pytestmark = pytest.mark.process

KEYS = [key_of(number) for number in range(40)]

StartNode = Callable[..., RunningNode]
Attach = Callable[..., RawEngine]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    end_keeper(tmp_path / "state")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "node" / "attach.sock"


@pytest.fixture
def start_node(socket: Path, state: Path, child_environ: dict[str, str]) -> Iterator[StartNode]:
    nodes: list[RunningNode] = []

    def start(extents: int = 8, *words: str) -> RunningNode:
        nodes.append(RunningNode(socket, state, child_environ, extents, *words))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.kill()


@pytest.fixture
def attach(socket: Path) -> Iterator[Attach]:
    engines: list[RawEngine] = []

    def attach(*settled_tokens: str) -> RawEngine:
        engines.append(RawEngine(socket, settled_tokens=settled_tokens))
        return engines[-1]

    yield attach
    for engine in engines:
        engine.close()


@pytest.fixture
def engine_process(socket: Path, child_environ: dict[str, str]) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """An engine of its own that has stored some keys, and is in the middle of another store."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int) -> subprocess.Popen[str]:
        command = [sys.executable, rawengine.__file__, str(socket), str(count), "0"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environ))
        stdout = started[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "stored\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def found(engine: RawEngine, keys: Sequence[bytes]) -> int:
    """How many leading keys there are."""
    return engine.lookup(keys, Hold.NOTHING).leading


def has_loaded(engine: RawEngine, keys: Sequence[bytes]) -> bool:
    return engine.load(keys) == len(keys)


def pool_of(shown: dict[str, Any]) -> dict[str, Any]:
    (pool,) = shown["pools"].values()
    found: dict[str, Any] = pool
    return found


def test_every_block_is_found_again_and_has_its_bytes(start_node: StartNode, attach: Attach) -> None:
    node = start_node()
    engine = attach()
    engine.store_until_found(KEYS)
    node.kill()
    again = start_node()
    assert pool_of(again.first)["blocks"] == len(KEYS)
    assert again.first["allocated"] == 8 * EXTENT_BYTES, "there is never a second pool"
    assert (again.first["problems"], again.first["faults"]) == ([], 0)
    engine = attach(engine.welcome.token)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    assert not pool_of(again.show())["is_waiting"]


def test_what_a_session_was_writing_waits_until_it_has_spoken(start_node: StartNode, attach: Attach) -> None:
    node = start_node()
    engine = attach()
    engine.store_until_found(KEYS)
    begun = engine.begin_store([key_of(1000), key_of(1001)])
    assert len(begun.slots) == 2
    node.kill()
    again = start_node()
    assert (pool_of(again.first)["quarantined"], pool_of(again.first)["is_waiting"]) == (2, True)
    assert [state for state, _ in again.first["sessions"].values()] == ["lost"]
    other = attach()  # of the same process, but it says nothing of the session before
    other.wait_for(lambda: other.load(KEYS) == len(KEYS))
    assert pool_of(again.show())["quarantined"] == 2
    engine = attach(engine.welcome.token)
    engine.wait_for(lambda: "lost" not in [state for state, _ in again.show()["sessions"].values()])
    assert (pool_of(again.show())["quarantined"], pool_of(again.show())["is_waiting"]) == (0, False)
    engine.store_all([key_of(1000), key_of(1001)])
    assert engine.load([key_of(1000), key_of(1001)]) == 2


@pytest.mark.parametrize("when", ["in the gap", "afterwards"])
def test_what_a_session_was_writing_waits_until_its_processes_are_dead(
    start_node: StartNode,
    engine_process: Callable[[int], subprocess.Popen[str]],
    eventually: Any,
    when: str,
) -> None:
    node = start_node()
    engine = engine_process(20)
    node.kill()
    if when == "in the gap":
        engine.kill()
        engine.wait()
    again = start_node()
    assert pool_of(again.first)["blocks"] == 20
    if when == "afterwards":
        assert pool_of(again.first)["quarantined"] == 1
        assert pool_of(again.first)["is_waiting"]
        engine.kill()
    eventually(lambda: again.show()["sessions"] == {})
    pool = pool_of(again.show())
    assert (pool["blocks"], pool["quarantined"], pool["is_waiting"]) == (20, 0, False)


def test_nothing_is_evicted_while_an_engine_of_before_may_read_it(
    start_node: StartNode, engine_process: Callable[[int], subprocess.Popen[str]], attach: Attach, eventually: Any
) -> None:
    node = start_node(2)
    num_slots = EXTENT_BYTES // rawengine.SLOT_BYTES  # of one extent for each of two ranks
    reader = engine_process(num_slots - 1)
    node.kill()
    again = start_node(2)
    engine = attach()
    engine.wait_for(lambda: found(engine, KEYS) == num_slots - 1)
    assert engine.load(KEYS) == num_slots // 2, "no session leases more"
    begun = engine.begin_store([key_of(5000)])
    assert (begun.op_id, dict(begun.outcomes)) == (0, {"dropped_cpu_full": 1})
    reader.kill()
    eventually(lambda: not pool_of(again.show())["is_waiting"])
    engine.store_all([key_of(5000), key_of(5001)])
    assert engine.load([key_of(5000), key_of(5001)]) == 2


def test_a_pool_has_its_share_until_its_engines_have_come_back_or_died(
    start_node: StartNode, engine_process: Callable[[int], subprocess.Popen[str]], attach: Attach, eventually: Any
) -> None:
    """Otherwise an engine of another pool that attaches first would take all its memory."""
    node = start_node()
    gone, stays = engine_process(20), attach()
    stays.wait_for(lambda: found(stays, KEYS) == 20)
    node.kill()
    again = start_node()
    share = again.first["shares"]
    assert share[stays.welcome.pool] >= 2 * EXTENT_BYTES, "the rows that it uses"
    gone.kill()
    stays = attach(stays.welcome.token)
    stays.wait_for(lambda: "lost" not in [state for state, _ in again.show()["sessions"].values()])
    assert again.show()["shares"].keys() == share.keys()
    stays.close()
    eventually(lambda: again.show()["shares"] == {})


def test_killed_again_and_again(start_node: StartNode, attach: Attach, eventually: Any) -> None:
    tokens: tuple[str, ...] = ()
    descriptors = list[int]()
    for number in range(4):
        node = start_node()
        if number > 1:  # each service has as many as the one before, but for files that it reads in this moment
            eventually(lambda node=node: node.show()["descriptors"] <= descriptors[1])
        descriptors.append(node.first["descriptors"])
        engine = attach(*tokens)
        engine.wait_for(partial(has_loaded, engine, KEYS[: 10 * number]))
        engine.store_until_found(KEYS[: 10 * (number + 1)])
        engine.begin_store([key_of(2000 + number)])
        tokens = (engine.welcome.token,)
        assert node.show()["allocated"] == 8 * EXTENT_BYTES
        node.kill()


def test_sigterm_gives_everything_back(start_node: StartNode, attach: Attach, state: Path) -> None:
    node = start_node()
    attach().store_until_found(KEYS)
    assert KeeperClient.look(state).infos
    assert node.stop() == 0
    with pytest.raises(KeeperError):
        KeeperClient.look(state)
    assert start_node().first["pools"] == {}


def test_sigterm_with_keep_on_stop_keeps_everything(start_node: StartNode, attach: Attach, state: Path) -> None:
    node = start_node(8, "keep")
    engine = attach()
    engine.store_until_found(KEYS)
    assert node.stop() == 0
    assert KeeperClient.look(state).infos
    again = start_node()
    engine = attach(engine.welcome.token)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))
    assert again.stop() == 0
    with pytest.raises(KeeperError):
        KeeperClient.look(state)


@pytest.mark.parametrize("has_recovered", [False, True])
def test_the_keeper_is_killed_beside_a_service(
    start_node: StartNode, attach: Attach, state: Path, eventually: Any, has_recovered: bool
) -> None:
    node = start_node()
    engine = attach()
    engine.store_until_found(KEYS)
    if has_recovered:
        node.kill()
        node = start_node()
        engine = attach(engine.welcome.token)
    os.kill(KeeperClient.look(state).pid, 9)

    def is_kept() -> bool:
        try:
            return any(name.startswith("worker-") for name in KeeperClient.look(state).infos)
        except KeeperError:
            return False

    eventually(is_kept)
    node.kill()
    start_node()
    engine = attach(engine.welcome.token)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))


class RealEngine:
    """The client of the package, in a process of its own, which stores, loads and verifies all the time."""

    def __init__(self, socket: Path, environ: dict[str, str]) -> None:
        command = [sys.executable, restartclient.__file__, str(socket), "1"]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def show(self) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("show\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        assert (found["mismatches"], found["faults"]) == (0, 0)
        return found

    def has_memory_besides(self, *pids: int) -> bool:
        """That is not also one of these processes'."""
        return self.process.pid in [one.pid for one in find_orphaned_memory(pids)]


@pytest.fixture
def real_engine(socket: Path, child_environ: dict[str, str]) -> Iterator[Callable[[], RealEngine]]:
    engines: list[RealEngine] = []

    def start() -> RealEngine:
        engines.append(RealEngine(socket, child_environ))
        return engines[-1]

    yield start
    for engine in engines:
        engine.process.kill()
        engine.process.communicate()


def test_the_keeper_runs_in_a_container_of_its_own(
    start_node: StartNode,
    real_engine: Callable[[], RealEngine],
    state: Path,
    child_environ: dict[str, str],
    eventually: Any,
) -> None:
    command = [sys.executable, "-m", "kvstow_service", "keeper", "--state", str(state)]
    keeper = subprocess.Popen(command, env=child_environ)
    node = start_node(8, "elsewhere")
    engine = real_engine()
    eventually(lambda: engine.show()["loads"] > 20)
    assert KeeperClient.look(state).pid == keeper.pid
    node.kill()
    again = start_node(8, "elsewhere")
    assert pool_of(again.first)["blocks"] > 0
    before = engine.show()["loads"]
    eventually(lambda: engine.show()["loads"] > before + 20)
    assert not engine.has_memory_besides(again.process.pid), "what it has mapped is what the service has"
    assert again.stop() == 0
    assert KeeperClient.look(state).infos == {}, "it waits for the next service, and holds nothing"
    keeper.terminate()
    assert keeper.wait(30) == 0


def test_engines_begin_with_an_empty_cache_when_the_keeper_is_killed_with_the_service(
    start_node: StartNode, real_engine: Callable[[], RealEngine], state: Path, eventually: Any
) -> None:
    node = start_node()
    engine = real_engine()
    eventually(lambda: engine.show()["loads"] > 20)
    node.kill()
    end_keeper(state, signal.SIGKILL)
    assert engine.has_memory_besides()
    again = start_node()
    assert again.first["pools"] == {}
    before = engine.show()["loads"]
    eventually(lambda: engine.show()["loads"] > before + 20)
    eventually(lambda: again.show()["allocated"] == 8 * EXTENT_BYTES)
    eventually(lambda: not engine.has_memory_besides(again.process.pid), "what it has mapped is what the service has")
    before = engine.show()["loads"]
    again.kill()
    pool_of(start_node().first)  # its keeper has everything
    eventually(lambda: engine.show()["loads"] > before + 20)


@pytest.mark.parametrize("keep", [False, True])
def test_a_service_that_stops_has_its_memory_back_unless_it_is_kept(
    start_node: StartNode, real_engine: Callable[[], RealEngine], state: Path, eventually: Any, keep: bool
) -> None:
    node = start_node(8, *["keep"] * keep)
    engine = real_engine()
    eventually(lambda: engine.show()["loads"] > 20)
    assert node.stop() == 0
    if keep:
        assert engine.has_memory_besides(), "for the next service"
        again = start_node()
        before = engine.show()["loads"]
        eventually(lambda: engine.show()["loads"] > before + 20)
        again.kill()
    else:
        eventually(lambda: not engine.has_memory_besides())


def test_no_service_comes_within_the_timeout_of_the_keeper(
    socket: Path, state: Path, child_environ: dict[str, str], start_node: StartNode, eventually: Any
) -> None:
    node = start_node(8, "timeout=0.5")
    keeper = KeeperClient.look(state).pid
    pidfd = os.pidfd_open(keeper)
    node.kill()
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    assert keeper not in [one.pid for one in find_orphaned_memory(())]
    assert start_node().first["pools"] == {}
