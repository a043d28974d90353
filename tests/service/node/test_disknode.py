"""A real `kvstow serve` with a disk: its blocks survive the service, its keeper and its engines."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from tests.service.node.keepers import end_keeper
from tests.service.node.rawengine import NAMED, POOL, SLOT_BYTES, RawEngine, keys_of
from tests.service.node.realservice import RealService
from tests.service.stores.disk.loopdisk import LoopDisk
from tests.waiting import eventually

from kvstow.attach.calls import Detach, Prefill, Reset, ResetDone
from kvstow.attach.identity import FleetWeights

pytestmark = pytest.mark.process

ONE_RANK_POOL = replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1)
ONE_RANK = replace(NAMED, pool=ONE_RANK_POOL)
MEMORY = ("--memory", "16MiB", "--extent-size", "2MiB", "--pin-pause", "0s")


class DiskService:
    """Services, one after the other, with the same disk and state folder."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self._folder = folder
        self.real = RealService(folder)
        self.disk = disk
        self.engines: list[RawEngine] = []
        self.client: httpx.Client

    def start(self, *options: str, waits: bool = True) -> None:
        state = ("--state", str(self._folder / "state"))
        disk = ("--disk", str(self.disk), "--disk-size", "64MiB")
        self.client = self.real.serve(*MEMORY, *disk, *state, *options)
        if waits:
            self.wait_for_disk()

    def wait_for_disk(self, state: str = "on") -> None:
        eventually(lambda: [part["state"] for part in self.parts()] == [state], "the disk")

    def wait_for_sessions(self, count: int) -> None:
        eventually(lambda: len(self.client.get("/v1/sessions").json()["items"]) == count, "the sessions")

    def parts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/v1/tier").json()["parts"]
        return found

    def part(self) -> dict[str, Any]:
        (part,) = self.parts()
        return part

    def attach(self, hello: Any = NAMED) -> RawEngine:
        self.engines.append(RawEngine(self.real.socket, hello))
        self.engines[-1].scheduler.send(Prefill((0.01, 0.0, 0.0)))  # so slow that every read pays
        return self.engines[-1]

    def child(self) -> int:
        """The process of the disk."""
        (pid,) = (
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdecimal()
            and b"kvstow_service.stores.disk.diskchild" in command_of(int(entry))
            and parent_of(int(entry)) == self.real.process.pid
        )
        return pid

    def kill_service(self) -> None:
        self.real.process.send_signal(signal.SIGKILL)
        self.real.process.wait()

    def kill(self) -> None:
        """The service, its keeper and its engines."""
        self.kill_service()
        end_keeper(self._folder / "state")
        self.close_engines()

    def stop(self) -> int:
        self.real.process.send_signal(signal.SIGTERM)
        return self.real.process.wait(60)

    def close_engines(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def close(self) -> None:
        self.close_engines()
        self.real.running.close()
        end_keeper(self._folder / "state")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def service(tmp_path: Path, disk_folder: Path) -> Iterator[DiskService]:
    (disk_folder / "disk").mkdir()
    made = DiskService(tmp_path, disk_folder / "disk")
    yield made
    made.close()


def store_on_disk(service: DiskService, engine: RawEngine, keys: list[bytes]) -> None:
    before = service.part()["counters"]["written_blocks"]
    engine.store_until_found(keys)

    def are_written() -> bool:
        engine.use(keys)
        return bool(service.part()["counters"]["written_blocks"] >= before + len(keys))

    engine.wait_for(are_written)


def read_again(engine: RawEngine, keys: list[bytes], least: int = 40) -> None:
    """Every byte of both ranks is verified."""
    engine.wait_for(lambda: engine.load(keys) >= least)


def test_blocks_survive_a_service_that_stops_its_keeper_and_engines(service: DiskService) -> None:
    service.start()
    keys = keys_of(0, 40)
    store_on_disk(service, service.attach(), keys)
    assert service.stop() == 0
    service.close_engines()
    service.start()
    assert service.part()["blocks"] == 40
    read_again(service.attach(), keys)
    (pool,) = service.client.get("/v1/tier").json()["items"]
    assert pool["counters"]["read_blocks"] >= 40


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_what_is_purged_before_an_engine_comes_back_leaves_the_disk(service: DiskService, how: str) -> None:
    service.start()
    process, _ = service.real.engine("--one-rank", "--weights", "digest 1", "--store", 39)  # and one more
    eventually(lambda: service.part()["counters"]["written_blocks"] == 40, "the writes")
    process.kill()
    process.wait()
    service.wait_for_sessions(0)
    service.kill_service()
    service.start()
    (pool,) = service.client.get("/v1/pools").json()["items"]
    assert service.part()["blocks"] == 40
    path = f"/v1/pools/{pool['name']}"
    if how == "delete":
        eventually(lambda: service.client.get(path).json()["sessions"] == 0, "the end of the recovered session")
        assert service.client.delete(path).json() == {"stored_blocks": 40, "notice": ""}
    else:
        purged = service.client.post(f"{path}/purge?wait=30", json={"all": True}).json()
        assert purged["stored_blocks"] == 40
    assert service.part()["blocks"] == 0
    data = service.disk / "kvstow" / "data"
    eventually(lambda: not any(data.read_bytes()), "zeros in place of the blocks")


def test_the_answer_names_a_disk_that_keeps_what_should_go(service: DiskService) -> None:
    """Of three pools, while another process has the files of the disk."""
    pools = [replace(ONE_RANK_POOL, kv_cache_dtype=dtype) for dtype in ("bfloat16", "float16", "fp8")]
    hellos = [replace(ONE_RANK, pool=pool, fleet_weights=FleetWeights(pool.kv_cache_dtype)) for pool in pools]
    service.start()
    for hello in hellos:
        store_on_disk(service, service.attach(hello), keys_of(0, 40))
        service.close_engines()
    service.kill()
    with (service.disk / "kvstow" / "records").open("rb") as records:
        fcntl.flock(records, fcntl.LOCK_EX)
        service.start(waits=False)
        service.wait_for_disk("in use")
        reset, purged, deleted = map(service.attach, hellos)
        notices = [reset.ask(Reset(), ResetDone).notice]
        purge = service.client.post(f"/v1/pools/{purged.welcome.pool}/purge", json={"all": True})
        deleted.workers[0].connection.close(Detach("done"))
        service.wait_for_sessions(2)
        delete = service.client.delete(f"/v1/pools/{deleted.welcome.pool}")
        notices += [answer.json()["notice"] for answer in (purge, delete)]
        for notice in notices:
            assert f"disk {service.disk} is in use" in notice
            assert "removed when the disk works again" in notice
    service.wait_for_disk()
    eventually(lambda: service.part()["blocks"] == 0, "the disk forgets what it was asked to forget")


def test_the_child_has_none_of_the_services_sockets(service: DiskService) -> None:
    service.start()
    service.attach()
    held = [os.readlink(f"/proc/{service.child()}/fd/{fd}") for fd in os.listdir(f"/proc/{service.child()}/fd")]
    assert len([name for name in held if name.startswith("socket:")]) == 1, held


def test_random_kills_lose_nothing_that_was_written(service: DiskService) -> None:
    random, written = Random(int(os.environ.get("KVSTOW_DISK_SEED", "1"))), 0
    for _ in range(int(os.environ.get("KVSTOW_DISK_ROUNDS", "3"))):
        service.start()
        engine = service.attach()
        for first in range(max(0, written - 320), written, 40):
            keys = keys_of(first, 40)
            read_again(engine, keys, 39)
        for _ in range(random.randrange(1, 4)):
            store_on_disk(service, engine, keys_of(written, 40))
            written += 40
        engine.store_until_found(keys_of(10_000, 40))  # some of it is under way at the end
        if random.random() < 0.5:
            os.kill(service.child(), signal.SIGKILL)
        service.kill()


def test_engines_of_a_killed_service_see_its_end_at_once_also_while_its_disk_hangs(
    tmp_path: Path, make_loop_disk: Callable[[], LoopDisk]
) -> None:
    loop_disk = make_loop_disk()
    service = DiskService(tmp_path, loop_disk.folder)
    try:
        service.start()
        engine, keys = service.attach(), keys_of(0, 40)
        store_on_disk(service, engine, keys)
        loop_disk.freeze()
        engine.store_until_found(keys_of(100, 40))
        engine.wait_for(lambda: service.part()["queued_write_bytes"] > 0)
        assert engine.lookup(keys_of(100, 40)).leading == 40, "requests go on"
        child = service.child()
        service.kill_service()
        engine.wait_for(lambda: engine.scheduler.state != "attached")
        assert os.path.exists(f"/proc/{child}"), "its child still waits for the disk"
        service.close_engines()
        service.start(waits=False)
        engine = service.attach()
        engine.store_until_found(keys_of(200, 40))
        assert [part["state"] for part in service.parts()] != ["on"]
        loop_disk.thaw()
        service.wait_for_disk()
        read_again(engine, keys)
    finally:
        loop_disk.thaw()
        service.close()
