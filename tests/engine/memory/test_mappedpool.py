from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from tests.descriptors import all_closed_again, open_descriptors
from tests.doubles.fakes import FakeClock, FakeRegistrar
from tests.engine.memory.measured import make_step
from tests.waiting import eventually

from kvstow.devices.base import TicketState
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ConflictError, CopyError, InvalidRequestError, PinError
from kvstow.layout import KVLayout, Region
from kvstow.memfd import create_memfd
from kvstow.memory.extents import EXTENT_NAME
from kvstow.memory.mappedpool import MappedExtent, MappedPool
from kvstow.memory.pinning import FixedPace

MIB = 1 << 20
PAGE = 4096


class Grant(NamedTuple):
    extent_id: int
    first_slot: int
    num_slots: int
    num_bytes: int
    populated_bytes: int


class Recorder(FakeRegistrar):
    """Records the order of calls, and the most bytes that were registered at a time."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.log: list[tuple[str, int]] = []
        self.most_bytes = 0

    def register(self, address: int, num_bytes: int) -> None:
        super().register(address, num_bytes)
        self.log.append(("register", num_bytes))
        self.most_bytes = max(self.most_bytes, self.locked_bytes)

    def unregister(self, address: int, num_bytes: int) -> None:
        super().unregister(address, num_bytes)
        self.log.append(("unregister", num_bytes))


class Extents:
    """The service's side: memfds that are partly populated."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def create(self, num_bytes: int, populated: int | None = None) -> int:
        fd = create_memfd(EXTENT_NAME, num_bytes)
        self.fds.append(fd)
        if populated != 0:
            os.posix_fallocate(fd, 0, num_bytes if populated is None else populated)
        return fd

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def extents() -> Iterator[Extents]:
    made = Extents()
    yield made
    made.close()


class MakePool:
    def __init__(self) -> None:
        self.pools: list[MappedPool] = []

    def __call__(
        self, registrar: FakeRegistrar | None = None, slot_bytes: int = 64 << 10, chunk_bytes: int = MIB
    ) -> MappedPool:
        pool = MappedPool(slot_bytes, registrar or FakeRegistrar(), pace=partial(FixedPace, chunk_bytes, 0.0))
        self.pools.append(pool)
        pool.start()
        return pool


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Pools whose mappings and descriptors are all gone at the end."""
    with all_closed_again():
        made = MakePool()
        yield made
        for pool in made.pools:
            pool.close()
        assert mappings() == []


def mappings() -> list[tuple[int, int]]:
    """The ranges of this process that map extents."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if f"memfd:{EXTENT_NAME}" in line]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def mapped_bytes() -> int:
    return sum(end - start for start, end in mappings())


def memory_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def grant(pool: MappedPool, fd: int, *, first: int = 0, populated: int | None = None, extent_id: int = 1) -> Grant:
    """Grant as many slots as fit."""
    size = os.fstat(fd).st_size
    granted = Grant(extent_id, first, size // pool.slot_stride, size, size if populated is None else populated)
    pool.grant(pool.slot_stride, [granted], [os.dup(fd)])
    return granted


def test_slots_lie_where_the_service_says(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    fds = [extents.create(2 * MIB), extents.create(4 * MIB)]
    for number, fd in enumerate(fds):
        for slot in range(32 << number):
            os.pwrite(fd, bytes([100 * number + slot]), slot * (64 << 10))
        grant(pool, fd, first=32 * number, extent_id=number)
    eventually(lambda: pool.pinned_slots == 96)
    addresses = pool.addresses(np.arange(96)).tolist()
    assert [ctypes.string_at(address, 1)[0] for address in addresses] == [*range(32), *range(100, 164)]
    ctypes.memset(addresses[40], 7, 1)
    assert os.pread(fds[1], 1, 8 * (64 << 10)) == b"\x07"
    assert pool.registered_slots() == [(0, 32), (1, 64)]
    assert pool.status().resident_bytes == mapped_bytes() == 6 * MIB


def test_nothing_above_the_populated_bytes_is_registered_mapped_or_touched(
    make_pool: MakePool, extents: Extents
) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar, slot_bytes=96 << 10)
    fd = extents.create(64 * MIB, populated=5 * MIB)
    charged = memory_of(fd)
    grant(pool, fd, populated=5 * MIB)  # counts as far as whole huge pages have memory
    eventually(lambda: pool.pinned_slots == 4 * MIB // (96 << 10))
    start = int(pool.addresses(np.zeros(1, np.int64))[0])
    assert max(address + size for address, size in registrar.registered.items()) <= start + 4 * MIB
    assert (mapped_bytes(), memory_of(fd)) == (4 * MIB, charged)
    with pytest.raises(CopyError, match="slot 42 is not pinned"):
        pool.hold(43)

    os.posix_fallocate(fd, 0, 10 * MIB)
    charged = memory_of(fd)
    pool.set_populated([(1, 10 * MIB), (99, 64 * MIB)])
    eventually(lambda: pool.pinned_slots == 10 * MIB // (96 << 10))
    pool.set_populated([(1, 2 * MIB)])
    assert pool.pinned_slots == 10 * MIB // (96 << 10)
    assert (mapped_bytes(), memory_of(fd)) == (10 * MIB, charged)


@pytest.mark.parametrize("slot_bytes", [4096, 3 * 1024 + 1, 5 * 4096, 100_003, 3 * MIB])
def test_registrations_tile_the_slots_in_whole_pages(make_pool: MakePool, extents: Extents, slot_bytes: int) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar, slot_bytes=slot_bytes, chunk_bytes=300_000)
    first = 0
    for number in range(2):
        first += grant(pool, extents.create(14 * MIB), first=first, extent_id=number).num_slots
    eventually(lambda: pool.pinned_slots == first)
    slots = pool.addresses(np.arange(first))
    ranges = sorted(registrar.registered.items())
    for start, size in ranges:
        assert (start % PAGE, size % PAGE) == (0, 0)
    for (start, size), (after, _) in pairwise(ranges):
        assert start + size <= after
    starts = np.array([start for start, _ in ranges])
    within = np.searchsorted(starts, slots, side="right") - 1
    ends = starts + np.array([size for _, size in ranges])
    assert (slots + slot_bytes <= ends[within]).all(), "no slot lies in two registrations"


def test_memory_is_mapped_where_the_kernel_can_use_huge_pages_and_a_child_inherits_none(
    make_pool: MakePool, extents: Extents
) -> None:
    pool = make_pool(slot_bytes=100 << 10, chunk_bytes=700 << 10)
    grant(pool, extents.create(4 * MIB), extent_id=1)
    grant(pool, extents.create(4 * MIB), first=40, extent_id=2)
    eventually(lambda: pool.pinned_slots == 80)
    found = mappings()
    assert len(found) == 2, "each is one range of the address space"
    assert all(start % (2 * MIB) == 0 and end - start == 4 * MIB for start, end in found)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = [number for number, line in enumerate(lines) if f"memfd:{EXTENT_NAME}" in line]
    flags = [next(line for line in lines[number:] if line.startswith("VmFlags:")) for number in heads]
    assert len(flags) == 2
    assert all(" dc" in line for line in flags)


def test_a_revoked_extent_is_used_no_more_and_goes_when_its_copies_have_ended(
    make_pool: MakePool, extents: Extents
) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    for number in range(2):
        grant(pool, extents.create(2 * MIB), first=32 * number, extent_id=number)
    eventually(lambda: pool.pinned_slots == 64)
    copy = pool.hold(40)
    pool.revoke([1])
    assert pool.pinned_slots == 32
    assert pool.registered_slots() == [(0, 32), (1, 0)]
    with pytest.raises(CopyError):
        pool.hold(33)
    with pool.hold(32):
        pass
    eventually(lambda: registrar.locked_bytes == 3 * MIB)  # what lies above the copy
    assert pool.take_released() == [], "the chunk under the copy stays"
    copy.close()
    eventually(lambda: pool.take_released() == [1])
    assert (registrar.locked_bytes, mapped_bytes(), pool.registered_slots()) == (2 * MIB, 2 * MIB, [(0, 32)])
    grant(pool, extents.create(2 * MIB), first=32, extent_id=2)
    eventually(lambda: pool.pinned_slots == 64)


def test_memory_of_the_session_before_is_not_mapped_or_registered_twice(make_pool: MakePool, extents: Extents) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    fds = [extents.create(2 * MIB) for _ in range(2)]
    for number, fd in enumerate(fds):
        grant(pool, fd, first=32 * number, extent_id=number)
    eventually(lambda: pool.pinned_slots == 64)
    calls = registrar.calls
    pool.begin_session()
    assert (pool.pinned_slots, pool.registered_slots(), mapped_bytes()) == (0, [], 4 * MIB)
    for number, fd in enumerate(fds):  # under the numbers of another service
        grant(pool, fd, first=32 * number, extent_id=70 + number)
    pool.drop_earlier()
    assert pool.pinned_slots == 64
    assert pool.registered_slots() == [(70, 32), (71, 32)]
    assert (registrar.calls, mapped_bytes()) == (calls, 4 * MIB)


def test_memory_that_is_not_granted_again_goes_before_new_memory_is_mapped(
    make_pool: MakePool, extents: Extents
) -> None:
    registrar = Recorder()
    pool = make_pool(registrar)
    for number in range(2):
        grant(pool, extents.create(2 * MIB), first=32 * number, extent_id=number)
    eventually(lambda: pool.pinned_slots == 64)
    pool.begin_session()
    grant(pool, extents.create(4 * MIB), extent_id=0)
    pool.drop_earlier()
    eventually(lambda: pool.pinned_slots == 64)
    assert registrar.log[:4] == [("register", MIB)] * 4
    assert registrar.log[4:8] == [("unregister", MIB)] * 4
    assert (registrar.most_bytes, mapped_bytes()) == (4 * MIB, 4 * MIB)
    assert pool.take_released() == [], "the service before waits for nothing"


def test_memory_that_nobody_grants_again_goes(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    grant(pool, extents.create(2 * MIB))
    eventually(lambda: pool.pinned_slots == 32)
    pool.begin_session()
    pool.drop_earlier()
    eventually(lambda: mapped_bytes() == 0)


def test_slots_of_new_memory_are_not_usable_while_old_memory_is_registered_there(
    make_pool: MakePool, extents: Extents
) -> None:
    go_on = threading.Event()

    class Slow(FakeRegistrar):
        def unregister(self, address: int, num_bytes: int) -> None:
            go_on.wait(30)
            super().unregister(address, num_bytes)

    pool = make_pool(Slow())
    old, new = extents.create(2 * MIB), extents.create(2 * MIB)
    os.pwrite(new, b"\7", 0)
    grant(pool, old)
    eventually(lambda: pool.pinned_slots == 32)
    pool.begin_session()
    grant(pool, new)
    pool.drop_earlier()
    assert (pool.pinned_slots, pool.registered_slots()) == (0, [])
    go_on.set()
    eventually(lambda: pool.pinned_slots == 32)
    assert ctypes.string_at(int(pool.addresses(np.zeros(1, np.int64))[0]), 1) == b"\7"


def test_memory_in_another_place_than_before_is_registered_anew(make_pool: MakePool, extents: Extents) -> None:
    registrar = Recorder()
    pool = make_pool(registrar)
    fds = [extents.create(2 * MIB) for _ in range(2)]
    for number, fd in enumerate(fds):
        os.pwrite(fd, bytes([number + 1]), 0)
        grant(pool, fd, first=32 * number, extent_id=number)
    eventually(lambda: pool.pinned_slots == 64)
    pool.begin_session()
    for number, fd in enumerate(reversed(fds)):
        grant(pool, fd, first=32 * number, extent_id=number)
    pool.drop_earlier()
    eventually(lambda: pool.pinned_slots == 64)
    assert [ctypes.string_at(address, 1) for address in pool.addresses(np.array([0, 32])).tolist()] == [b"\2", b"\1"]
    assert registrar.most_bytes == 4 * MIB


def test_an_extent_arrives_until_those_with_its_slots_are_retired(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    for number, first in ((1, 0), (2, 32)):
        grant(pool, extents.create(2 * MIB), first=first, extent_id=number)
    eventually(lambda: pool.pinned_slots == 64)
    both, lower = pool.hold(64), pool.hold(32)
    pool.revoke([1, 2])
    grant(pool, extents.create(2 * MIB), first=16, extent_id=3)
    both.close()
    eventually(lambda: pool.take_released() == [2])
    assert 3 not in dict(pool.registered_slots()), "a copy still uses the slots of the other one"
    lower.close()
    eventually(lambda: 3 in dict(pool.registered_slots()))
    assert pool.take_released() == [1]


def test_an_extent_that_still_arrives_when_a_session_begins_goes(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    grant(pool, extents.create(2 * MIB), extent_id=1)
    eventually(lambda: pool.pinned_slots == 32)
    with pool.hold(32):
        pool.revoke([1])
        grant(pool, extents.create(2 * MIB), extent_id=2)
        pool.begin_session()
    eventually(lambda: mapped_bytes() == 0)
    assert pool.take_released() == [], "the service of this session waits for none of them"


def test_what_the_service_must_not_grant_is_refused(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    grant(pool, extents.create(2 * MIB), extent_id=1)
    before = open_descriptors()
    other = extents.create(2 * MIB)
    with pytest.raises(ConflictError, match="extents 1 and 2 both have slots from 31 on"):
        grant(pool, other, first=31, extent_id=2)
    with pytest.raises(ConflictError, match="were 65536 before"):
        pool.grant(128 << 10, [Grant(3, 32, 16, 2 * MIB, 0)], [os.dup(other)])
    with pytest.raises(InvalidRequestError, match="allowed: 65536 or more"):
        pool.grant(4096, [Grant(3, 32, 16, 2 * MIB, 0)], [os.dup(other)])
    assert len(open_descriptors() - before) == 1


def test_an_extent_revoked_before_it_was_mapped_is_let_go_of(make_pool: MakePool, extents: Extents) -> None:
    pool = make_pool()
    grant(pool, extents.create(2 * MIB, populated=0), populated=0, extent_id=5)
    pool.revoke([5, 99])
    eventually(lambda: pool.take_released() == [5])


def test_a_failed_chunk_stops_growth_until_it_is_tried_again_and_does_not_stop_giving_back(
    make_pool: MakePool, extents: Extents
) -> None:
    registrar = FakeRegistrar({3: PinError("driver", "injected"), 4: PinError("driver", "again")})
    pool = make_pool(registrar)
    for number in range(2):
        grant(pool, extents.create(2 * MIB), first=32 * number, extent_id=number)
    eventually(lambda: pool.status().state == "degraded")
    assert (pool.pinned_slots, pool.status().error) == (48, "injected")
    pool.retry()
    eventually(lambda: pool.status().error == "again")
    pool.revoke([1])
    eventually(lambda: pool.take_released() == [1])
    assert (pool.pinned_slots, mapped_bytes()) == (32, 2 * MIB)


def test_copies_reach_every_extent(make_pool: MakePool, extents: Extents) -> None:
    """Blocks that are neighbours on the device, in slots on both sides of a seam."""
    slot_bytes = 96 << 10
    pool = make_pool(slot_bytes=slot_bytes)
    first = 0
    for number in range(3):
        first += grant(pool, extents.create(2 * MIB), first=first, extent_id=number).num_slots
    eventually(lambda: pool.pinned_slots == first)
    regions = (Region("a", 70, 64 << 10, 64 << 10), Region("b", 70, 32 << 10, 32 << 10))
    kv = [np.random.default_rng(7).integers(0, 256, (70, region.page_bytes), np.uint8) for region in regions]
    before = [pages.copy() for pages in kv]
    device = CpuDevice(pool, KVLayout(regions), kv)
    slots = Random(5).sample(range(first), first)[:20] + list(range(15, 55))
    slots = list(dict.fromkeys(slots))
    blocks = list(range(len(slots)))
    store = device.launch_store(1, blocks, slots, None)
    assert store.poll() is TicketState.DONE
    for pages in kv:
        pages[:] = 0
    back = blocks[::-1]
    load = device.launch_load(2, back, slots, None)
    assert load.poll() is TicketState.DONE
    for pages, expected in zip(kv, before, strict=True):
        assert (pages[back] == expected[blocks]).all()
    device.close()


@pytest.fixture
def stepping(extents: Extents, calls_of: Callable[[int], None]) -> Iterator[Stepping]:
    calls_of(2 * MIB)
    made = Stepping(extents)
    yield made
    made.pool.close()


class Stepping:
    """A pool with one extent, whose host makes steps. The pinning thread has mapped several chunks of it. Only a few
    are registered, because this thread is the host's."""

    def __init__(self, extents: Extents) -> None:
        self.clock, self.registrar = FakeClock(), FakeRegistrar()
        self.pool = MappedPool(64 << 10, self.registrar, clock=self.clock, cpu_clock=self.clock)
        self.fd = extents.create(64 * MIB)
        self.step()
        self.pool.start()
        grant(self.pool, self.fd)
        eventually(lambda: mapped_bytes() == 16 * MIB)
        eventually(lambda: self.step() and self.pool.pinned_slots)

    def step(self) -> bool:
        return make_step(self.pool.steps, self.clock)


def test_an_extent_that_is_revoked_while_its_chunks_are_registered_goes_at_once(stepping: Stepping) -> None:
    calls = stepping.registrar.calls
    stepping.pool.revoke([1])
    eventually(lambda: stepping.step() and stepping.pool.take_released() == [1])
    assert (stepping.registrar.calls, stepping.registrar.registered, mapped_bytes()) == (calls, {}, 0)


def test_a_new_session_ends_the_growth_of_the_one_before_and_registers_the_rest_once_granted(
    stepping: Stepping,
) -> None:
    calls = stepping.registrar.calls
    stepping.pool.begin_session()
    for _ in range(50):
        stepping.step()
    eventually(lambda: mapped_bytes() == calls * 2 * MIB)
    assert stepping.registrar.calls == calls
    grant(stepping.pool, stepping.fd)
    eventually(lambda: stepping.step() and stepping.pool.pinned_slots == 1024)
    assert stepping.registrar.calls == 32


def test_chunks_of_two_extents_that_were_populated_in_vain_are_given_back(
    extents: Extents, calls_of: Callable[[int], None]
) -> None:
    calls_of(2 * MIB)
    clock = FakeClock()
    pool = MappedPool(64 << 10, FakeRegistrar(), clock=clock, cpu_clock=clock)
    try:
        pool.steps.begin()  # nobody makes the calls
        for number in range(2):
            grant(pool, extents.create(4 * MIB), first=64 * number, extent_id=number)
        pool.start()
        eventually(lambda: pool.status().resident_bytes == 8 * MIB)
        pool.begin_session()
        eventually(lambda: pool.status().resident_bytes == 0)
        assert mapped_bytes() == 0
    finally:
        pool.close()


def test_beside_an_idle_host_another_thread_maps_memory_than_the_one_that_registers_it(
    extents: Extents, calls_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that attaches registers what the service has kept, with nothing else to do."""
    chunk, mapping, threads = 2 * MIB, MappedExtent.map, list[str]()
    calls_of(chunk)

    def noted(extent: MappedExtent, start: int, end: int) -> None:
        threads.append(threading.current_thread().name)
        mapping(extent, start, end)

    monkeypatch.setattr(MappedExtent, "map", noted)
    pool = MappedPool(64 << 10, FakeRegistrar(), cpu_clock=FakeClock())
    try:
        grant(pool, extents.create(chunk))
        grant(pool, extents.create(19 * chunk), first=32, extent_id=2)
        pool.start()
        eventually(lambda: pool.pinned_slots == 20 * 32)
        assert pool.registered_slots() == [(1, 32), (2, 19 * 32)]
        assert mapped_bytes() == pool.status().resident_bytes == 20 * chunk
        assert threads[0] == "kvstow-pin", "so that the first slots can be used soon"
        assert any(name.startswith("kvstow-ahead") for name in threads)
    finally:
        pool.close()
