"""Pools in reserved huge pages. Tests that take `reserve` need the right to reserve some."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.doubles.fakes import FakeRegistrar
from tests.engine.memory.measured import pool_bytes
from tests.engine.memory.oldkernel import OldKernel
from tests.waiting import eventually

from kvstow.config import PoolConfig
from kvstow.errors import InsufficientMemoryError, PinError
from kvstow.memory import hostpool
from kvstow.memory import region as region_module
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import HugePageLimits
from kvstow.memory.pinning import PopulateOnly
from kvstow.memory.region import HUGE_PAGE_BYTES, HostRegion

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]
    Reserve = Callable[[int], None]

MIB = 1 << 20
SLOT = 3 * MIB // 2  # chunks of one or two of them end within a huge page


def free_pages() -> int:
    return int((HugePageLimits().pages / "free_hugepages").read_text())


def hugetlb_bytes(pool: HostPool) -> int:
    """What the kernel counts as taken from the reserved pages for the pool's addresses."""
    return pool_bytes(pool, "Private_Hugetlb", "Shared_Hugetlb")


def ready(pool: HostPool, slots: int) -> Callable[[], bool]:
    return lambda: pool.pinned_slots == slots and pool.status().state == "ready"


def fill(pool: HostPool, slot: int) -> None:
    ctypes.memset(pool.address + slot * pool.slot_stride, slot + 1, pool.slot_bytes)


def holds_its_number(pool: HostPool, slot: int) -> bool:
    found = ctypes.string_at(pool.address + slot * pool.slot_stride, pool.slot_bytes)
    return found == bytes([slot + 1]) * pool.slot_bytes


def test_a_pool_lies_in_reserved_pages_grows_and_gives_them_back(make_pool: MakePool, reserve: Reserve) -> None:
    reserve(8)
    before = free_pages()
    pool = make_pool(
        slot_bytes=SLOT, pool_bytes=5 * SLOT, max_bytes=10 * SLOT, chunk_bytes=2 * MIB, huge_pages="reserved"
    )
    assert hugetlb_bytes(pool) == 0
    pool.start()
    eventually(ready(pool, 5))
    status = pool.status()
    assert status.pinned_bytes == 5 * SLOT
    assert hugetlb_bytes(pool) == status.resident_bytes == 8 * MIB, "7.5 MiB, and the rest of its last page"
    assert sum(status.numa_bytes.values()) in (8 * MIB, 0), "empty if the kernel does not report it"
    for slot in range(5):
        fill(pool, slot)
    pool.set_target(2)
    eventually(lambda: pool.status().resident_bytes == 4 * MIB)
    assert (hugetlb_bytes(pool), before - free_pages()) == (4 * MIB, 2), "the page on the boundary stays"
    pool.set_target(10)
    eventually(ready(pool, 10))
    assert hugetlb_bytes(pool) == pool.status().resident_bytes == 16 * MIB
    for slot in range(2, 10):
        fill(pool, slot)
    assert all(holds_its_number(pool, slot) for slot in range(10))
    pool.close()
    assert free_pages() == before


def test_growth_stops_with_a_reason_when_pages_run_out_and_continues_with_more(
    make_pool: MakePool, reserve: Reserve
) -> None:
    reserve(2)
    registrar = FakeRegistrar()
    pool = make_pool(registrar, slot_bytes=SLOT, pool_bytes=5 * SLOT, chunk_bytes=2 * MIB, huge_pages="reserved")
    pool.start()
    eventually(lambda: pool.status().state == "degraded")
    status = pool.status()
    assert (status.error_reason, status.pinned_slots) == ("hugepages", 2)
    assert status.error == "populating 2 MiB failed: the machine or the cgroup has no reserved 2 MiB page left"
    assert hugetlb_bytes(pool) == status.resident_bytes == 4 * MIB
    assert registrar.locked_bytes == 2 * SLOT
    fill(pool, 1)
    reserve(4)
    pool.retry()
    eventually(ready(pool, 5))
    assert holds_its_number(pool, 1)


def test_a_commit_that_runs_out_in_the_middle_keeps_none(reserve: Reserve) -> None:
    reserve(3)
    before = free_pages()
    region = HostRegion(8 * HUGE_PAGE_BYTES, "reserved")
    with pytest.raises(PinError, match="no reserved 2 MiB page left") as caught:
        region.commit(0, region.num_bytes)
    assert (caught.value.reason, free_pages()) == ("hugepages", before)
    region.close()


def test_a_pool_larger_than_the_free_pages_is_refused_before_it_uses_any(
    reserve: Reserve,
) -> None:
    reserve(4)
    fits = free_pages() * HUGE_PAGE_BYTES
    HostPool(PoolConfig(4096, fits, huge_pages="reserved"), PopulateOnly()).close()
    with pytest.raises(InsufficientMemoryError, match=r"are needed in reserved 2 MiB pages .*, but the machine has"):
        HostPool(PoolConfig(4096, fits + 4096, huge_pages="reserved"), PopulateOnly())


def test_a_kernel_that_cannot_take_pages_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped: list[int] = []

    class Kernel(OldKernel):
        def munmap(self, address: int, num_bytes: int) -> int:
            unmapped.append(num_bytes)
            return int(self.libc.munmap(address, num_bytes))

    monkeypatch.setattr(region_module, "libc", Kernel(unknown_advice=4))
    with pytest.raises(PinError, match=r"needs Linux 5\.18: MADV_DONTNEED failed with EINVAL") as caught:
        HostRegion(6 * HUGE_PAGE_BYTES, "reserved")
    assert caught.value.reason == "hugepages"
    assert unmapped[-1] == 6 * HUGE_PAGE_BYTES


def test_reserved_pages_are_never_populated_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing would end the process by a SIGBUS."""
    region = HostRegion(HUGE_PAGE_BYTES, "reserved")
    monkeypatch.setattr(region_module, "libc", OldKernel(unknown_advice=23))
    with pytest.raises(PinError, match="populating 2 MiB failed: EINVAL") as caught:
        region.commit(0, HUGE_PAGE_BYTES)
    assert caught.value.reason == "hugepages"
    region.close()


class PagesOfHugeSize:
    """A region that only keeps the books: every page is committed once, and given back once."""

    page_bytes = HUGE_PAGE_BYTES
    address = 1 << 40

    def __init__(self, num_bytes: int, huge_pages: str) -> None:
        assert huge_pages == "reserved"
        self.num_bytes = num_bytes
        self.pages: set[int] = set()

    def _range(self, offset: int, num_bytes: int) -> set[int]:
        assert num_bytes > 0
        assert offset % HUGE_PAGE_BYTES == num_bytes % HUGE_PAGE_BYTES == 0
        return set(range(offset, offset + num_bytes, HUGE_PAGE_BYTES))

    def commit(self, offset: int, num_bytes: int, *, plenty: bool = False, threads: int = 1) -> None:
        pages = self._range(offset, num_bytes)
        assert not pages & self.pages
        self.pages |= pages

    def decommit(self, offset: int, num_bytes: int) -> None:
        pages = self._range(offset, num_bytes)
        assert pages <= self.pages
        self.pages -= pages

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("slot_bytes", [4096, 12 * 1024, 100_003, SLOT, 2 * MIB, 5 * MIB])
@pytest.mark.parametrize("chunk_bytes", [16 << 10, 2 * MIB, 7 * MIB])
def test_whole_huge_pages_are_committed_and_all_are_freed(
    make_pool: MakePool,
    monkeypatch: pytest.MonkeyPatch,
    slot_bytes: int,
    chunk_bytes: int,
) -> None:
    made: list[PagesOfHugeSize] = []

    def make(num_bytes: int, huge_pages: str) -> PagesOfHugeSize:
        made.append(PagesOfHugeSize(num_bytes, huge_pages))
        return made[0]

    monkeypatch.setattr(hostpool, "HostRegion", make)
    pool = make_pool(slot_bytes=slot_bytes, pool_bytes=15 * MIB, chunk_bytes=chunk_bytes, huge_pages="reserved")
    (region,) = made
    pool.start()
    for target in (pool.max_slots, pool.max_slots // 3, pool.max_slots // 2, 0):
        pool.set_target(target)
        eventually(lambda slots=target: pool.pinned_slots == slots)
        eventually(lambda: len(region.pages) * HUGE_PAGE_BYTES == pool.status().resident_bytes)
        assert pool.status().resident_bytes >= target * pool.slot_stride
        assert pool.status().error is None
    eventually(lambda: not region.pages)
