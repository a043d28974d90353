"""Service, keeper and engines are real processes that are killed, stopped and go on late, at random, and the keeper
loses what it has. No loaded byte is wrong, and no start fails. `make soak` does the long form."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.service.node import faultykeeper, noderunner
from tests.service.node.noderunner import EXTENT_BYTES, RunningNode
from tests.service.node.restartclient import RestartEngine
from tests.waiting import eventually

pytestmark = pytest.mark.process

EXTENTS = 6
DTYPES = ("uint8", "int8")


class Machine:
    """One node. Each action may leave the service dead; `round` starts it again."""

    def __init__(self, folder: Path, environ: dict[str, str], seed: int) -> None:
        self.socket, self.state = folder / "node" / "attach.sock", folder / "state"
        self.environ, self.chance = environ, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.loads = 0
        self.keeper = self.start_keeper()
        self.node: RunningNode | None = None
        self.engines: list[RestartEngine] = []
        self.start()
        for dtype in DTYPES:
            self.add_engine(dtype)

    # -- processes ------------------------------------------------------------------------------------------

    def start_keeper(self) -> subprocess.Popen[str]:
        command = [sys.executable, faultykeeper.__file__, str(self.state), str(self.chance.randrange(1 << 30))]
        keeper = subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        return keeper

    def start(self) -> None:
        """No start may fail."""
        self.done["starts"] += 1
        self.node = RunningNode(self.socket, self.state, self.environ, EXTENTS, "elsewhere")
        assert self.node.first["faults"] == 0
        assert self.node.first["allocated"] <= EXTENTS * EXTENT_BYTES
        self.done["warm starts"] += bool(self.node.first["pools"])

    def add_engine(self, dtype: str) -> None:
        self.engines.append(RestartEngine(self.socket, self.environ, self.chance.randrange(1 << 30), dtype))

    @contextmanager
    def stopped(self, process: subprocess.Popen[str]) -> Iterator[None]:
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    # -- actions --------------------------------------------------------------------------------------------

    def rest(self, most: float = 1.0) -> None:
        """Until the next random point."""
        time.sleep(most * self.chance.random() ** 2)

    def kill_service(self) -> None:
        assert self.node is not None
        self.node.kill()
        self.node = None

    def kill_keeper(self) -> None:
        self.keeper.kill()
        self.keeper.communicate()
        self.rest()
        self.keeper = self.start_keeper()

    def lose_descriptors(self) -> None:
        self.keeper.send_signal(signal.SIGUSR1)

    def stall_keeper(self) -> None:
        """The service goes on without it. Memory changes hands meanwhile."""
        with self.stopped(self.keeper):
            self.rest(4.0)
            self.replace_engine()
            self.rest(2.0)
            if self.chance.random() < 0.6:
                self.kill_service()

    def stall_keeper_over_a_start(self) -> None:
        self.kill_service()
        with self.stopped(self.keeper):
            self.start()
            self.rest(2.0)
            if self.chance.random() < 0.5:
                self.kill_service()

    def stall_service(self) -> None:
        """A successor does not start beside it, also at another socket. One that comes after its end does. A keeper
        that has just been started knows of no service before the service has joined it: then a successor would start,
        with a cold cache."""
        assert self.node is not None
        self.wait_for_the_keeper(self.node)
        with self.stopped(self.node.process):
            self.rest()
            if self.chance.random() < 0.3:
                socket = self.socket if self.chance.random() < 0.5 else self.socket.parent.parent / "other.sock"
                successor = self.begin_start(socket)
                _, said = successor.communicate(timeout=60)
                assert successor.returncode
                assert b"ConflictError" in said or b"KeeperBusyError" in said, said
                self.done["successors refused"] += 1
        self.rest()

    def wait_for_the_keeper(self, node: RunningNode) -> None:
        deadline = time.monotonic() + 60
        while any("there is no keeper" in problem for problem in node.show()["problems"]):
            assert time.monotonic() < deadline, "the service has not joined its keeper"
            time.sleep(0.1)

    def stall_engine(self) -> None:
        """It goes on after a restart, and may write late."""
        with self.stopped(self.chance.choice(self.engines).process):
            self.rest()
            self.kill_service()
            self.start()
            self.rest()

    def replace_engine(self) -> None:
        gone = self.engines.pop(self.chance.randrange(len(self.engines)))
        self.count(gone)
        gone.kill()
        self.add_engine(gone.dtype)

    def begin_start(self, socket: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, noderunner.__file__, str(socket), str(self.state), str(EXTENTS), "elsewhere"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environ, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe)

    def kill_a_start(self) -> None:
        self.kill_service()
        process = self.begin_start(self.socket)
        time.sleep(0.2 + 0.6 * self.chance.random())
        process.kill()
        process.communicate()

    def kill_everything_but_engines(self) -> None:
        self.kill_service()
        self.kill_keeper()

    def round(self) -> None:
        actions: list[Callable[[], None]] = [
            self.kill_service,
            self.kill_service,
            self.kill_keeper,
            self.lose_descriptors,
            self.stall_keeper,
            self.stall_keeper_over_a_start,
            self.stall_service,
            self.stall_engine,
            self.replace_engine,
            self.kill_a_start,
            self.kill_everything_but_engines,
        ]
        self.rest(2.0)
        for action in self.chance.choices(actions, k=self.chance.randint(1, 2)):
            if self.node is None:
                break
            action()
            self.done[action.__name__] += 1
        if self.node is not None and self.chance.random() < 0.5:
            self.kill_service()
        if self.node is None:
            self.start()

    def count(self, engine: RestartEngine) -> None:
        self.loads += engine.show()["loads"]

    def finish(self) -> None:
        """Everything works again: all engines load, and the node has its memory."""
        assert self.node is not None
        before = [engine.show()["loads"] for engine in self.engines]
        eventually(lambda: all(one.show()["loads"] > n for one, n in zip(self.engines, before, strict=True)))
        for engine in self.engines:
            self.count(engine)
            engine.kill()
        node = self.node
        eventually(lambda: not node.show()["sessions"], "the end of the sessions")
        eventually(lambda: node.show()["allocated"] == EXTENTS * EXTENT_BYTES, "the node's memory")
        shown = node.show()
        assert shown["faults"] == 0
        for pool in shown["pools"].values():
            assert (pool["quarantined"], pool["is_waiting"]) == (0, False)
            assert pool["blocks"] + pool["free"] == pool["usable"], "no slot is lost"

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()
        if self.node is not None:
            self.node.kill()
        self.keeper.kill()
        self.keeper.communicate()


def run(folder: Path, environ: dict[str, str], seed: int, rounds: int) -> Machine:
    machine = Machine(folder, environ, seed)
    try:
        for _ in range(rounds):
            machine.round()
        machine.finish()
    finally:
        machine.close()
    assert machine.loads > 0
    return machine


def test_whatever_is_lost_the_worst_outcome_is_a_cold_cache(tmp_path: Path, child_environ: dict[str, str]) -> None:
    run(tmp_path, child_environ, 1, 5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 105))
def test_it_is_a_cold_cache_also_after_many_rounds(tmp_path: Path, child_environ: dict[str, str], seed: int) -> None:
    begun = time.monotonic()
    machine = run(tmp_path, child_environ, seed, 30)
    print(f"{time.monotonic() - begun:.0f} s, {machine.loads} loaded blocks were compared: {dict(machine.done)}")
