"""The store on disks with real processes and files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.engine.tier.blockstorecontract import SLOT_BYTES, BlockStoreContract, Client, keys_of
from tests.waiting import eventually

from kvstow.memfd import create_memfd
from kvstow.tier.blockstore import BlockStore, PurgeWish, StoredExtent, StorePart
from kvstow_service.stores.disk.diskpath import DiskPath
from kvstow_service.stores.disk.diskstore import DiskStore
from kvstow_service.stores.disk.startcheck import CheckedPath

MIB = 1 << 20


@contextmanager
def opened(
    *paths: Path, size: int = 64 * MIB, writes: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[DiskStore]:
    reading, writing = os.pipe()
    store = DiskStore([CheckedPath(path) for path in paths], size, writes, clock=clock)
    store.start(writing)
    try:
        yield store
    finally:
        store.close()
        os.close(writing)
        os.close(reading)


def is_on(store: DiskStore) -> bool:
    return all(part.state == "on" for part in store.parts())


@contextmanager
def running(
    *paths: Path, size: int = 64 * MIB, writes: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[DiskStore]:
    with opened(*paths, size=size, writes=writes, clock=clock) as store:
        eventually(lambda: is_on(store), "disks that are on")
        yield store


def part_of(store: BlockStore) -> StorePart:
    (part,) = store.parts()
    return part


class TestContract(BlockStoreContract):
    @pytest.fixture
    def store(self, disk_folder: Path) -> Iterator[BlockStore]:
        with running(disk_folder) as store:
            yield store


class TestContractWithTwoPaths(BlockStoreContract):
    @pytest.fixture
    def store(self, disk_folder: Path) -> Iterator[BlockStore]:
        for name in ("a", "b"):
            (disk_folder / name).mkdir(exist_ok=True)
        with running(disk_folder / "a", disk_folder / "b") as store:
            yield store


def filled(store: DiskStore, count: int) -> Client:
    client = Client(store)
    for slot in range(100, 100 + count):
        client.fill(slot, slot)
    assert client.move("write", keys_of(range(count)), range(100, 100 + count)) == (set(range(100, 100 + count)), set())
    return client


def again(store: DiskStore, before: Client) -> Client:
    """The same pool in another life of the service."""
    client = Client(store, identity=before.layout.identity, owner=before.layout.owner)
    client.fingerprint = before.fingerprint
    return client


def assert_reads(client: Client, count: int) -> None:
    good, bad = client.move("read", keys_of(range(count)), range(100, 100 + count))
    assert (good, bad) == (set(range(100, 100 + count)), set())
    for slot in range(100, 100 + count):
        assert client.bytes_in(slot) == [bytes([slot]) * size for size in SLOT_BYTES]


def test_blocks_survive_the_store(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        before = filled(store, 32)
    with running(disk_folder) as store:
        client = again(store, before)
        assert client.has(keys_of(range(33))) == [True] * 32 + [False]
        assert_reads(client, 32)


def test_a_child_that_is_killed_is_started_again_and_finds_everything(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        client = filled(store, 32)
        (pid,) = store.pids()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: store.pids() != [pid] and is_on(store))
        assert_reads(client, 32)
        assert part_of(store).counters.restarts == 1


def test_memory_that_comes_while_a_child_ends_is_not_kept(disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = create_memfd("kvstow-comes-late", MIB)
    ended = DiskPath.ended

    def add_and_end(path: DiskPath, reason: str) -> None:
        if path.is_open:
            path.add_extent(1000, memory, MIB)
        ended(path, reason)

    monkeypatch.setattr(DiskPath, "ended", add_and_end)
    with running(disk_folder) as store:
        (child,) = store.pids()
        assert child is not None
        os.kill(child, signal.SIGKILL)
        eventually(lambda: part_of(store).counters.restarts == 1 and is_on(store))
    descriptors = [entry.path for entry in os.scandir("/proc/self/fd")]
    assert sum("kvstow-comes-late" in os.readlink(one) for one in descriptors if os.path.islink(one)) == 1
    os.close(memory)


def test_the_files_are_the_users_alone_and_as_large_as_configured(disk_folder: Path) -> None:
    with running(disk_folder, size=80 * MIB) as store:
        assert part_of(store).size_bytes == 80 * MIB
    found = {entry.name: entry.stat() for entry in os.scandir(disk_folder / "kvstow")}
    assert set(found) == {"data", "records"}
    assert found["data"].st_size == 80 * MIB
    assert found["data"].st_blocks * 512 >= 80 * MIB, "allocated at the start"
    assert found["records"].st_blocks * 512 < 4 * MIB, "it has holes where no chunk has places"
    assert {entry.st_mode & 0o777 for entry in found.values()} == {0o600}
    assert (disk_folder / "kvstow").stat().st_mode & 0o777 == 0o700


def test_files_that_another_process_has_are_in_use_until_it_ends(disk_folder: Path) -> None:
    with running(disk_folder) as first:
        before = filled(first, 4)
        with opened(disk_folder) as second:
            eventually(lambda: part_of(second).state == "in use")
            client = again(second, before)
            assert client.has(keys_of(range(4))) == [False] * 4
            assert client.move("write", keys_of(range(1)), [100])[1] == {100}
            first.close()
            eventually(lambda: is_on(second))
            assert client.has(keys_of(range(4))) == [True] * 4


def test_foreign_files_are_left_alone(disk_folder: Path) -> None:
    (disk_folder / "kvstow").mkdir(exist_ok=True)
    content = b"somebody's" * 4000
    (disk_folder / "kvstow" / "records").write_bytes(content)
    with opened(disk_folder) as store:
        eventually(lambda: part_of(store).state == "failed")
        assert "none of KVStow's" in part_of(store).reason
    assert (disk_folder / "kvstow" / "records").read_bytes() == content


@pytest.mark.parametrize("name", ["data", "records"])
def test_a_file_that_is_a_link_is_refused(disk_folder: Path, name: str) -> None:
    (disk_folder / "kvstow").mkdir(exist_ok=True)
    victim = disk_folder / "victim"
    victim.write_bytes(b"precious")
    (disk_folder / "kvstow" / name).symlink_to(victim)
    with opened(disk_folder) as store:
        eventually(lambda: part_of(store).state == "failed")
    assert victim.read_bytes() == b"precious"


def test_flipped_bits_are_never_read_and_counted(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        before = filled(store, 16)
    data = bytearray((disk_folder / "kvstow" / "data").read_bytes())
    flipped = {at for at in range(0, len(data), 12288) if data[at] in (101, 107)}
    assert len(flipped) == 2
    for at in flipped:
        data[at] ^= 1
    (disk_folder / "kvstow" / "data").write_bytes(data)
    with running(disk_folder) as store:
        client = again(store, before)
        good, bad = client.move("read", keys_of(range(16)), range(120, 136))
        assert bad == {121, 127}
        assert all(client.bytes_in(slot)[0] == bytes([slot - 20]) * SLOT_BYTES[0] for slot in good)
        assert part_of(store).counters.corrupt_blocks == 2
        assert client.has(keys_of(range(16))) == [slot not in (1, 7) for slot in range(16)]


def test_files_that_somebody_removes_are_made_anew(disk_folder: Path) -> None:
    """The open files would work until the next start, which would find nothing."""
    ahead = 0.0
    with running(disk_folder, clock=lambda: time.monotonic() + ahead) as store:
        client = filled(store, 16)
        shutil.rmtree(disk_folder / "kvstow")
        ahead = 61.0  # files are synced once a minute
        eventually(lambda: (disk_folder / "kvstow" / "data").exists(), "files")
        eventually(lambda: is_on(store))
        assert client.has(keys_of(range(16))) == [False] * 16


def test_a_truncated_data_file_costs_what_it_held(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        before = filled(store, 16)
    os.truncate(disk_folder / "kvstow" / "data", 8 * 12288)
    with running(disk_folder) as store:
        client = again(store, before)
        good, bad = client.move("read", keys_of(range(16)), range(120, 136))
        assert len(good) == 8
        assert part_of(store).counters.corrupt_blocks == len(bad) == 8


def test_no_byte_of_what_was_purged_is_left_in_the_files(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        client, other = Client(store), Client(store)
        for number, one in enumerate((client, other)):
            for slot in range(100, 120):
                one.fill(slot, 200 + number)
            one.move("write", keys_of(range(20)), range(100, 120))
        assert client.purge(PurgeWish()).blocks == 20
        assert client.has(keys_of(range(20))) == [False] * 20
        data = disk_folder / "kvstow" / "data"
        eventually(lambda: bytes([200]) * 16 not in data.read_bytes(), "the end of the purged bytes")
        assert bytes([201]) * 4096 in data.read_bytes()
        assert other.has(keys_of(range(20))) == [True] * 20


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01])
def test_a_purge_that_a_kill_interrupts_is_finished_by_the_next_start(disk_folder: Path, delay: float) -> None:
    with running(disk_folder) as store:
        client = filled(store, 60)
        client.purge(PurgeWish())
        time.sleep(delay)
        (pid,) = store.pids()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    with running(disk_folder) as store:
        assert again(store, client).has(keys_of(range(60))) == [False] * 60
        data = disk_folder / "kvstow" / "data"
        eventually(lambda: not any(data.read_bytes()), "the end of the purged bytes")


def test_a_purge_beside_writes_lets_none_of_them_become_visible(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        client, keys = Client(store), keys_of(range(64))
        op_id = client.begin("write", keys, range(100, 164))
        client.purge(PurgeWish())
        client.finish(op_id, 64)
        assert client.has(keys) == [False] * 64
    with running(disk_folder) as store:
        assert again(store, client).has(keys) == [False] * 64


def test_prefixes_and_ages_are_known_after_a_restart(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        before = filled(store, 8)
    with running(disk_folder) as store:
        client = again(store, before)
        assert client.purge(PurgeWish(age_seconds=3600.0)).blocks == 0
        assert client.purge(PurgeWish(key_prefixes=(b"\1",)), dry_run=True).blocks == 0
        assert client.purge(PurgeWish(key_prefixes=(b"\0\0\0",)), dry_run=True).blocks == 8
        assert client.purge(PurgeWish(age_seconds=-10.0)).blocks == 8


def test_a_disk_that_is_full_evicts_what_was_used_longest_ago(disk_folder: Path) -> None:
    with running(disk_folder, size=1 * MIB) as store:
        client = Client(store)
        places = MIB // 12288
        for first in range(0, 2 * places, 16):
            client.move("write", keys_of(range(first, first + 16)), range(100, 116))
            client.offer(keys_of(range(16)), is_use=True)
        part = part_of(store)
        assert part.used_bytes is not None
        assert part.used_bytes <= MIB
        assert part.counters.evicted_blocks > 0
        assert client.has(keys_of(range(16))) == [True] * 16


def test_a_write_budget_refuses_what_is_over_it(disk_folder: Path) -> None:
    with running(disk_folder, writes=24 * 12288) as store:  # one block an hour
        client = Client(store)
        assert client.offer(keys_of(range(4))) == []
        assert client.move("write", keys_of(range(1)), [100]) == (set(), {100})
        assert part_of(store).write_budget_bytes == 24 * 12288


def test_reads_that_take_long_are_expected_to_before_they_have_ended(disk_folder: Path) -> None:
    ahead = 0.0
    with running(disk_folder, clock=lambda: time.monotonic() + ahead) as store:
        client = filled(store, 40)
        assert_reads(client, 40)
        expected = client.pool.expect(1).seconds
        assert expected is not None
        (child,) = store.pids()
        assert child is not None
        os.kill(child, signal.SIGSTOP)
        op_id = client.begin("read", keys_of(range(40)), range(100, 140))
        ahead = 20.0
        slow = client.pool.expect(1).seconds
        assert slow is not None
        assert slow > 20.0
        ahead = 0.0
        os.kill(child, signal.SIGCONT)
        assert client.finish(op_id, 40) == (set(range(100, 140)), set())


def test_slots_without_padding_are_refused_with_a_sentence(disk_folder: Path) -> None:
    with running(disk_folder) as store:
        client = Client(store)
        extent = StoredExtent(99, 1000, 4, 8704, MIB)
        answer = client.wait_for(lambda then: client.pool.add_extent(0, extent, 0, then))
        assert "multiples of 4096" in str(answer)
