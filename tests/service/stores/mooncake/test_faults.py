"""What the store, its processes and our own may do at the worst moment, over a real Mooncake."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.service.stores.mooncake.clientcontract import SLOT, WITNESS, Slots
from tests.service.stores.mooncake.cluster import Cluster, ElectedCluster
from tests.waiting import eventually

from kvstow.errors import TierTimeoutError, TierUnavailableError
from kvstow.keys import make_key
from kvstow_service.stores.mooncake.childchannel import ChildProcess
from kvstow_service.stores.mooncake.childmessages import Answer
from kvstow_service.stores.mooncake.mooncakestore import (
    MooncakeLocation,
    MooncakeLookups,
    MooncakeStore,
    MooncakeTransfers,
)
from kvstow_service.stores.mooncake.objects import GetStatus, ObjectName, PutStatus

pytestmark = pytest.mark.tier

TIMEOUT = 30.0
SHORT = 1.0  # of calls that nobody answers
LARGE = 32 * SLOT  # more than a child copies
FIRST_TARGET = 64  # slots from here on are filled by gets

_fingerprints = count(1)


class Node:
    """One rank's slots, and the clients of one store."""

    def __init__(self, location: MooncakeLocation) -> None:
        self.slots = Slots()
        self.fingerprint = f"{os.getpid():x}f{next(_fingerprints):x}"
        store = MooncakeStore(location)
        self.transfers: MooncakeTransfers = store.open_transfers(WITNESS)
        self.transfers.add_memory(self.slots.range)
        self.lookups: MooncakeLookups = store.open_lookups()

    def name(self, number: int) -> ObjectName:
        return ObjectName(self.fingerprint, make_key(0, number.to_bytes(32, "big")), 0, 1)

    def put(self, *numbers: int, timeout: float = TIMEOUT) -> list[PutStatus]:
        """Slot `number` holds the byte `number`."""
        return self.transfers.put([self.slots.object(self.name(number), number) for number in numbers], timeout)

    def get(self, *numbers: int, timeout: float = TIMEOUT) -> list[GetStatus]:
        return self.transfers.get(
            [self.slots.object(self.name(number), FIRST_TARGET + number) for number in numbers], timeout
        )

    def exists(self, *numbers: int, timeout: float = TIMEOUT) -> list[bool]:
        return self.lookups.exists([self.name(number) for number in numbers], timeout)

    def blank(self) -> None:
        """Fill all targets with a byte that no object has."""
        for slot in range(FIRST_TARGET, 2 * FIRST_TARGET):
            self.slots.fill(slot, 0xFF)

    def is_right(self, number: int) -> bool:
        return self.slots.read(FIRST_TARGET + number) == self.slots.read(number)

    def targets(self) -> list[bytes]:
        return [self.slots.read(slot) for slot in range(FIRST_TARGET, 2 * FIRST_TARGET)]

    def close(self) -> None:
        self.transfers.close()
        self.lookups.close()
        self.slots.close()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    node = Node(cluster.location)
    yield node
    node.close()


def pid_of(client: MooncakeTransfers | MooncakeLookups) -> int:
    pid = client.pid
    assert pid is not None
    return pid


def is_there(pid: int) -> bool:
    """Whether a process runs, or has ended without having been waited for."""
    return Path(f"/proc/{pid}").exists()


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stored(node: Node, *numbers: int) -> bool:
    """For a store that may not be back yet."""
    try:
        return node.put(*numbers) == ["stored"] * len(numbers)
    except TierUnavailableError:
        return False


def test_a_get_that_hangs_is_ended_and_its_process_is_gone_when_the_call_ends(cluster: Cluster, node: Node) -> None:
    assert node.put(*range(16)) == ["stored"] * 16
    assert node.exists(1) == [True]
    transfers, lookups = pid_of(node.transfers), pid_of(node.lookups)
    node.blank()
    cluster.stop(cluster.provider)
    with pytest.raises(TierTimeoutError):
        node.get(*range(16), timeout=SHORT)
    assert not is_there(transfers)
    cluster.resume(cluster.provider)
    node.blank()
    blank = node.targets()
    assert node.exists(1) == [True]
    assert pid_of(node.lookups) == lookups  # the look-ups' process lives on
    assert node.put(20) == ["stored"]  # by another process, with the same memory
    assert node.targets() == blank  # nothing came late
    assert node.get(*range(16)) == ["found"] * 16
    assert all(node.is_right(number) for number in range(16))
    assert node.transfers.health().timeouts == 1
    assert node.transfers.health().restarts == 1
    assert node.lookups.health().restarts == 0


def test_a_put_that_hangs_is_ended_and_publishes_nothing_wrong(cluster: Cluster, node: Node) -> None:
    assert node.put(0) == ["stored"]
    transfers = pid_of(node.transfers)
    cluster.stop(cluster.provider)
    with pytest.raises(TierTimeoutError):
        node.put(*range(1, 17), timeout=SHORT)
    assert not is_there(transfers)
    cluster.resume(cluster.provider)
    for number in range(1, 17):
        node.slots.fill(number, 0xEE)  # other blocks now
    node.blank()
    found = node.get(*range(17))
    assert found[0] == "found"
    for number in range(1, 17):
        assert found[number] != "found" or node.slots.read(FIRST_TARGET + number)[:1] == bytes([number])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set as soon as a process of ours is about to be asked for a get."""
    asked, ask = Event(), ChildProcess.ask

    def note_and_ask(child: ChildProcess, lane: str, *given: Any, **more: Any) -> Answer:
        if lane == "get":
            asked.set()
        return ask(child, lane, *given, **more)

    monkeypatch.setattr(ChildProcess, "ask", note_and_ask)
    return asked


def test_a_process_of_ours_that_is_killed_during_a_get_is_replaced(cluster: Cluster, node: Node, asked: Event) -> None:
    assert node.put(*range(16)) == ["stored"] * 16
    transfers = pid_of(node.transfers)
    cluster.stop(cluster.provider)
    outcome: list[object] = []

    def get() -> None:
        try:
            outcome.append(node.get(*range(16)))
        except TierUnavailableError as error:
            outcome.append((type(error), is_there(transfers)))

    thread = Thread(target=get)
    thread.start()
    assert asked.wait(TIMEOUT)
    os.kill(transfers, signal.SIGKILL)
    thread.join(TIMEOUT)
    assert outcome == [(TierUnavailableError, False)]
    cluster.resume(cluster.provider)
    assert node.get(*range(16)) == ["found"] * 16
    assert all(node.is_right(number) for number in range(16))
    assert pid_of(node.transfers) != transfers


def test_idle_processes_that_are_killed_are_replaced(node: Node) -> None:
    assert stored(node, 1)
    assert node.exists(1) == [True]
    for client in (node.transfers, node.lookups):
        before = pid_of(client)
        os.kill(before, signal.SIGKILL)
        eventually(lambda: client.pid not in (None, before), "another process", seconds=90)  # noqa: B023
        assert not is_there(before)
        assert client.health().state == "on"
    assert node.get(1) == ["found"]
    assert node.is_right(1)
    assert node.exists(1) == [True]


def test_a_provider_that_is_killed(cluster: Cluster, node: Node) -> None:
    assert node.put(*range(64)) == ["stored"] * 64
    node.blank()
    cluster.kill(cluster.provider)
    with suppress(TierTimeoutError):
        statuses = node.get(*range(64))
        assert set(statuses) <= {"failed", "missing"}
    with suppress(TierTimeoutError):
        assert "stored" not in node.put(*range(64, 70))
    eventually(lambda: node.get(0) == ["missing"], "the master has forgotten its objects", seconds=180)
    cluster.start_provider()
    eventually(lambda: stored(node, 1), "the new provider takes objects", seconds=90)
    assert node.get(1, 2) == ["found", "missing"]
    assert node.is_right(1)


def test_a_master_that_is_killed(cluster: Cluster, node: Node) -> None:
    assert node.put(1) == ["stored"]
    assert node.exists(1) == [True]
    cluster.kill(cluster.master)
    for call in (node.put, node.get, node.exists):
        with pytest.raises(TierUnavailableError):
            call(1)
    cluster.start_master()
    eventually(lambda: stored(node, 2), "the new master takes objects", seconds=90)
    assert node.get(2) == ["found"]
    assert node.is_right(2)

    def exists() -> bool:
        try:
            return node.exists(2) == [True]
        except TierUnavailableError:
            return False

    eventually(exists, "the new master answers look-ups", seconds=90)


def test_another_master_takes_over_with_all_objects(alone: None, tmp_path: Path) -> None:
    etcd = shutil.which("etcd")
    if etcd is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    cluster = ElectedCluster(tmp_path / "log", etcd)
    node = Node(cluster.location)
    try:
        assert node.put(*range(32)) == ["stored"] * 32
        eventually(lambda: all(str(node.name(number)) in cluster.log() for number in range(32)), "the log", seconds=90)
        cluster.kill(cluster.master)
        eventually(lambda: cluster.leader is not None, "another master leads", seconds=90)

        def all_found() -> bool:
            node.blank()
            try:
                return node.get(*range(32)) == ["found"] * 32
            except TierUnavailableError:
                return False

        eventually(all_found, "the objects of before", seconds=90)
        assert all(node.is_right(number) for number in range(32))
        eventually(lambda: stored(node, 40), "it takes objects", seconds=90)
        assert node.get(40) == ["found"]
        assert node.is_right(40)
    finally:
        node.close()
        cluster.close()


def test_a_master_that_hangs(cluster: Cluster, node: Node) -> None:
    assert node.put(1) == ["stored"]
    assert node.exists(1) == [True]
    pids = {pid_of(node.transfers), pid_of(node.lookups)}
    cluster.stop(cluster.master)
    for call in (node.put, node.exists):
        with pytest.raises(TierTimeoutError):
            call(1, timeout=SHORT)
    assert not any(is_there(pid) for pid in pids)
    assert node.transfers.health().timeouts == node.lookups.health().timeouts == 1
    with pytest.raises(TierUnavailableError):
        node.exists(1, timeout=SHORT)  # no process is connected
    assert node.transfers.health().state == "starting"
    cluster.resume(cluster.master)
    eventually(lambda: stored(node, 2), "it answers again", seconds=90)
    node.blank()
    assert node.get(2) == ["found"]
    assert node.is_right(2)


def test_a_store_without_room(make_cluster: Callable[..., Cluster]) -> None:
    node = Node(make_cluster(16 << 20, watermark=0.95).location)  # so that it evicts only what does not fit
    large = FIRST_TARGET * SLOT  # 64 of them are twice what the store has
    try:
        names = [node.name(number) for number in range(64)]
        statuses = node.transfers.put([node.slots.object(name, 0, large) for name in names], TIMEOUT)
        assert set(statuses) == {"stored", "full"}
        for name, status in zip(names, statuses, strict=True):
            node.blank()
            (found,) = node.transfers.get([node.slots.object(name, FIRST_TARGET, large)], TIMEOUT)
            assert found == ("found" if status == "stored" else "missing")
            assert status == "full" or all(node.is_right(slot) for slot in range(FIRST_TARGET))
    finally:
        node.close()


# Puts other bytes under a name, as a store with a defect would: argv = master, "name", the way of damage, another name
_DAMAGE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
name, way, other = sys.argv[2:]
data = bytearray(store.get(other if way == "other" else name))
assert data
if way in ("slot", "header"):
    data[0 if way == "slot" else -1] ^= 1
elif way == "short":
    del data[-1:]
elif way == "long":
    data += b"x"
assert store.remove(name, True) == 0
assert store.put(name, bytes(data)) == 0
os._exit(0)
"""


@pytest.mark.parametrize("num_bytes", [SLOT, LARGE], ids=["copied", "in place"])
@pytest.mark.parametrize("way", ["slot", "header", "other", "short", "long"])
def test_an_object_with_other_bytes_is_never_found(shared_cluster: Cluster, way: str, num_bytes: int) -> None:
    node = Node(shared_cluster.location)
    try:
        puts = [node.slots.object(node.name(number), number, num_bytes) for number in (1, 2, 3)]
        target = node.slots.object(node.name(2), FIRST_TARGET, num_bytes)
        other = node.slots.object(node.name(1), FIRST_TARGET + LARGE // SLOT, num_bytes)
        assert node.transfers.put(puts, TIMEOUT) == ["stored"] * 3
        names = (str(node.name(2)), way, str(node.name(3)))
        damage = [sys.executable, "-c", _DAMAGE, shared_cluster.location.master, *names]
        subprocess.run(damage, check=True, capture_output=True, timeout=TIMEOUT)
        found = node.transfers.get([other, target], TIMEOUT)
        assert found[0] == "found"
        if way in ("slot", "header", "other"):
            assert found[1] == "corrupt"
            assert node.exists(1, 2, 3) == [True, False, True]  # it does not stay
            assert node.transfers.put([puts[1]], TIMEOUT) == ["stored"]
            assert node.transfers.get([target], TIMEOUT) == ["found"]
            assert all(node.slots.read(FIRST_TARGET + at) == node.slots.read(2 + at) for at in range(num_bytes // SLOT))
        else:
            assert found[1] == "failed"
    finally:
        node.close()


def test_memory_that_was_removed_is_mapped_no_more(node: Node) -> None:
    assert node.put(1) == ["stored"]

    def is_mapped() -> bool:
        return "memfd:kvstow-tier-test" in Path(f"/proc/{pid_of(node.transfers)}/maps").read_text()

    assert is_mapped()
    node.transfers.remove_memory(node.slots.range.range_id)
    assert not is_mapped()
    node.transfers.add_memory(node.slots.range)
    assert is_mapped()
    assert node.get(1) == ["found"]


def test_closing_ends_a_call_that_hangs(cluster: Cluster, node: Node, asked: Event) -> None:
    assert node.put(1) == ["stored"]
    pid = pid_of(node.transfers)
    cluster.stop(cluster.provider)
    errors: list[Exception] = []

    def get() -> None:
        try:
            node.get(1)
        except TierUnavailableError as error:
            errors.append(error)

    thread = Thread(target=get)
    thread.start()
    assert asked.wait(TIMEOUT)
    node.transfers.close()
    thread.join(TIMEOUT)
    assert len(errors) == 1
    assert not is_there(pid)


# Opens a client, and says which process is its own: argv = URL
_HOST = """
import os, sys, time
from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation, MooncakeStore
_, witness = os.pipe()
client = MooncakeStore(MooncakeLocation.parse(sys.argv[1])).open_transfers(witness)
while client.pid is None:
    time.sleep(0.01)
print(client.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_of_ours_ends_with_the_process_that_started_it(
    shared_cluster: Cluster, child_environ: dict[str, str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOST, shared_cluster.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environ,
    ) as host:
        assert host.stdout is not None
        child = int(host.stdout.readline())
        assert is_there(child)
        host.kill()
    eventually(lambda: has_ended(child), "the end of the process")


def test_a_store_that_is_not_there() -> None:
    node = Node(MooncakeLocation.parse("mooncake://127.0.0.1:50049"))
    try:
        with pytest.raises(TierUnavailableError, match="not connected to Mooncake"):
            node.put(1, timeout=0.1)
        eventually(lambda: "code -1" in node.lookups.health().reason, "the reason", seconds=90)
        assert node.lookups.health().state == "starting"
    finally:
        node.close()
