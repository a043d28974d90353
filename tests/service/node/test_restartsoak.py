"""The service is SIGKILLed at random points while engines store and load, and are killed too: no loaded byte is wrong,
and at the end nothing is left. `make soak` does 100 rounds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.node import restartclient
from tests.service.node.noderunner import EXTENT_BYTES, RunningNode
from tests.service.node.survival.test_survival import end_keeper

from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeperclient import KeeperClient
from kvstow_service.node.survival.orphanedmemory import extents_of, find_orphaned_memory

pytestmark = pytest.mark.process

EXTENTS = 4


class Client:
    def __init__(self, socket: Path, seed: int, environ: dict[str, str]) -> None:
        command = [sys.executable, restartclient.__file__, str(socket), str(seed)]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._read() == "ready\n"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def show(self) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("show\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self._read())
        return found

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=60)


class Soak:
    """Rounds, each of which ends with a killed service."""

    def __init__(
        self, folder: Path, environ: dict[str, str], seed: int, eventually: Any, *, with_keeper: bool = False
    ) -> None:
        """`with_keeper`: it is killed at once with each service, so that the cache is lost."""
        self.with_keeper = with_keeper
        self.socket, self.state = folder / "node" / "attach.sock", folder / "state"
        self.environ, self.eventually = environ, eventually
        self.chance = random.Random(seed)
        self.node = self.start()
        self.clients = [self.attach() for _ in range(2)]
        self.loads = self.mismatches = 0
        self.descriptors: list[int] = []
        self.keepers: set[int] = set()

    def start(self) -> RunningNode:
        return RunningNode(self.socket, self.state, self.environ, EXTENTS)

    def attach(self) -> Client:
        return Client(self.socket, self.chance.randrange(1 << 30), self.environ)

    def round(self) -> None:
        self.keepers.add(KeeperClient.look(self.state).pid)
        time.sleep(3 * self.chance.random() ** 2)  # until the point at which it is killed
        if self.chance.random() < 0.2:
            self.replace_client()
        if self.chance.random() < 0.2:
            os.kill(KeeperClient.look(self.state).pid, 9)
            time.sleep(2.5 * self.chance.random())
            self.wait_for_keeper()
        self.node.kill()
        if self.with_keeper:
            self.next_pod()
            return
        if self.chance.random() < 0.2:
            self.replace_client()
        self.node = self.start()
        self.descriptors.append(self.node.first["descriptors"])
        assert (self.node.first["problems"], self.node.first["faults"]) == ([], 0)
        assert self.node.first["allocated"] == EXTENTS * EXTENT_BYTES
        assert self.memory_bytes() <= 1.02 * EXTENTS * EXTENT_BYTES, "there is never a second pool"

    def next_pod(self) -> None:
        end_keeper(self.state, signal.SIGKILL)
        self.node = self.start()
        assert self.node.first["pools"] == {}
        before = sum(client.show()["loads"] for client in self.clients)
        self.eventually(lambda: sum(client.show()["loads"] for client in self.clients) > before + 20)
        self.eventually(lambda: self.node.show()["allocated"] == EXTENTS * EXTENT_BYTES)
        shown = self.node.show()
        assert (shown["problems"], shown["faults"]) == ([], 0)

    def memory_bytes(self) -> int:
        """Of all extents that the node, its keepers and the engines keep alive."""
        pids = [self.node.process.pid, *self.keepers, *(client.process.pid for client in self.clients)]
        found: dict[tuple[int, int], int] = {}
        for pid in pids:
            for extent, num_bytes in extents_of(Path(f"/proc/{pid}")).items():
                found[extent] = max(num_bytes, found.get(extent, 0))
        return sum(found.values())

    def wait_for_keeper(self) -> None:
        """Until another one holds everything: a service that is killed before that takes the memory with it."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if any(name.startswith("journal-") for name in KeeperClient.look(self.state).infos):
                    return
            except KeeperError:
                time.sleep(0.01)
        raise AssertionError("there is no other keeper")

    def replace_client(self) -> None:
        gone = self.clients.pop(self.chance.randrange(len(self.clients)))
        self.count(gone)
        gone.end(kill=self.chance.random() < 0.7)
        self.clients.append(self.attach())

    def count(self, client: Client) -> None:
        shown = client.show()
        self.loads += shown["loads"]
        self.mismatches += shown["mismatches"]
        assert shown["faults"] == 0

    def finish(self, eventually: Any) -> None:
        time.sleep(1.0)
        for client in self.clients:
            self.count(client)
            client.end()
        eventually(lambda: not self.node.show()["sessions"], "all sessions have ended")
        (pool,) = self.node.show()["pools"].values()
        assert (pool["quarantined"], pool["is_waiting"]) == (0, False)
        assert pool["blocks"] + pool["free"] == pool["usable"], "no slot is leased, filling or lost"
        names = sorted(name.partition("-")[0] for name in KeeperClient.look(self.state).infos)
        assert names == ["extent"] * EXTENTS + ["journal"], "no worker is left at the keeper"
        assert self.node.stop() == 0
        with pytest.raises(KeeperError):
            KeeperClient.look(self.state)
        mine = {self.node.process.pid, *self.keepers, *(client.process.pid for client in self.clients)}
        assert not [one for one in find_orphaned_memory(()) if one.pid in mine]
        if not self.with_keeper:
            self.check_descriptors()

    def check_descriptors(self) -> None:
        most_workers = 2 * 3 * restartclient.RANKS
        assert max(self.descriptors) <= min(self.descriptors) + 2 * most_workers, "they follow the number of workers"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_keeper(tmp_path / "state")


def run(folder: Path, environ: dict[str, str], rounds: int, eventually: Any, **options: Any) -> Soak:
    soak = Soak(folder, environ, rounds, eventually, **options)
    try:
        for _ in range(rounds):
            soak.round()
        soak.finish(eventually)
    finally:
        for client in soak.clients:
            client.process.kill()
            client.process.communicate()
        if soak.node.process.poll() is None:
            soak.node.kill()
    assert soak.mismatches == 0
    assert soak.loads > 0
    return soak


def test_rounds_of_killed_services(folder: Path, child_environ: dict[str, str], eventually: Any) -> None:
    run(folder, child_environ, 3, eventually)


def test_rounds_of_services_that_are_killed_with_their_keepers(
    folder: Path, child_environ: dict[str, str], eventually: Any
) -> None:
    run(folder, child_environ, 4, eventually, with_keeper=True)


@pytest.mark.soak
def test_a_hundred_rounds_of_killed_services(folder: Path, child_environ: dict[str, str], eventually: Any) -> None:
    begun = time.monotonic()
    soak = run(folder, child_environ, 100, eventually)
    print(f"{time.monotonic() - begun:.0f} s:", end=" ")
    print(f"{soak.loads} loaded blocks were compared on {restartclient.RANKS} ranks over 100 killed services")
