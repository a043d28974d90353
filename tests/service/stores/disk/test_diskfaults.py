"""Disks that hang, fail or are full: their blocks are missing, and nothing else is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.tier.blockstorecontract import Client, keys_of
from tests.service.stores.disk.loopdisk import LoopDisk
from tests.service.stores.disk.test_diskstore import MIB, filled, is_on, opened, part_of, running
from tests.waiting import eventually

from kvstow.tier.blockstore import PurgeWish
from kvstow_service.stores.disk.diskpath import STUCK_SECONDS

MakeLoopDisk = Callable[..., LoopDisk]


class Ahead:
    """A clock that a test can put forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.seconds


def slots_back(client: Client, op_id: int) -> list[int]:
    return [slot for piece in list(client.ended.get(op_id, ())) for slot in (*piece.good, *piece.bad)]


def begin_writes(client: Client, first: int, count: int) -> int:
    return client.begin("write", keys_of(range(first, first + count)), range(100 + first, 100 + first + count))


def test_a_frozen_disk_keeps_the_slots_of_what_is_under_way_and_nothing_else(
    make_loop_disk: MakeLoopDisk, disk_folder: Path
) -> None:
    frozen, clock = make_loop_disk(), Ahead()
    with running(frozen.folder, disk_folder, clock=clock) as store:
        hung, good = store.parts()
        client = filled(store, 40)
        there = client.has(keys_of(range(40)))
        assert all(there)
        frozen.freeze()
        op_id = begin_writes(client, 40, 20)
        eventually(lambda: len(slots_back(client, op_id)) >= 10, "the end of the other disk's writes")
        clock.seconds = STUCK_SECONDS + 1
        eventually(lambda: store.parts()[0].state == "stuck")
        assert store.parts()[0].stuck_slots > 0
        assert store.parts()[1].state == "on"
        lost = [not found for found in client.has(keys_of(range(40)))]
        assert any(lost)
        assert not all(lost)
        kept = 20 - len(slots_back(client, op_id))
        assert 0 < kept <= 20
        assert client.move("read", keys_of(range(40)), range(100, 140))[1]
        assert "stuck" in client.purge(PurgeWish(keys=keys_of(range(40, 41)))).notice
        frozen.thaw()
        eventually(lambda: is_on(store))
        client.finish(op_id, 20)
        assert hung.name == str(frozen.folder)
        assert good.name == str(disk_folder)


def test_the_end_of_the_store_does_not_wait_for_a_disk_that_hangs(make_loop_disk: MakeLoopDisk) -> None:
    disk = make_loop_disk()
    with running(disk.folder) as store:
        client = filled(store, 4)
        disk.freeze()
        op_id = begin_writes(client, 10, 4)
        store.close(seconds=1.0)
        assert len(slots_back(client, op_id)) < 4, "a slot that the kernel may still read is never given back"
        with opened(disk.folder) as second:
            assert part_of(second).state != "on", "the former process may still write"
            disk.thaw()
            eventually(lambda: is_on(second))


def test_a_disk_that_fails_is_probed_and_used_again(make_loop_disk: MakeLoopDisk) -> None:
    disk = make_loop_disk()
    with running(disk.folder) as store:
        client = filled(store, 16)
        size = os.path.getsize(disk.image)
        os.truncate(disk.image, 1 * MIB)
        good, _ = client.move("read", keys_of(range(16)), range(120, 136))
        assert good == set()
        if part_of(store).counters.failed_blocks:
            assert part_of(store).state == "failed"
            assert client.has(keys_of(range(16))) == [False] * 16
        os.truncate(disk.image, size)
        eventually(lambda: is_on(store))


def test_a_full_disk_is_not_used_and_says_so(make_loop_disk: MakeLoopDisk) -> None:
    disk = make_loop_disk()
    with opened(disk.folder, size=1 << 30) as store:
        eventually(lambda: part_of(store).state == "failed")
        assert "No space left" in part_of(store).reason


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_both_file_systems_keep_blocks(make_loop_disk: MakeLoopDisk, file_system: str) -> None:
    disk = make_loop_disk(file_system)
    with running(disk.folder) as store:
        client = filled(store, 20)
        client.purge(PurgeWish(keys=keys_of(range(4))))
        assert client.has(keys_of(range(20))) == [False] * 4 + [True] * 16
