from __future__ import annotations

import ctypes
import errno
import os

import pytest
from tests.engine.memory.oldkernel import OldKernel

from kvstow.errors import PinError
from kvstow.memory import region as region_module
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, HostRegion

POPULATE = 23
"""The advice MADV_POPULATE_WRITE."""


def mapped(address: int) -> str | None:
    """The permissions of the mapping that holds `address`; None where there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, permissions = line.split()[:2]
            first, end = (int(part, 16) for part in bounds.split("-"))
            if first <= address < end:
                return permissions
    return None


def test_reserving_is_aligned_and_gives_no_access_until_committed() -> None:
    region = HostRegion(64 << 30)
    assert region.address % HUGE_PAGE_BYTES == 0
    assert mapped(region.address) == mapped(region.address + region.num_bytes - 1) == "---p"
    region.commit(4 * PAGE_BYTES, PAGE_BYTES)
    assert mapped(region.address + 4 * PAGE_BYTES) == "rw-p"
    assert mapped(region.address + 5 * PAGE_BYTES) == "---p"
    region.close()


def test_a_decommitted_range_has_lost_its_bytes_and_allows_no_access() -> None:
    region = HostRegion(2 * PAGE_BYTES)
    region.commit(0, PAGE_BYTES)
    ctypes.memset(region.address, 7, PAGE_BYTES)
    region.decommit(0, PAGE_BYTES)
    assert mapped(region.address) == "---p"
    region.commit(0, PAGE_BYTES)
    assert ctypes.string_at(region.address, PAGE_BYTES) == bytes(PAGE_BYTES)
    region.close()


def test_close_frees_the_address_space_and_is_idempotent() -> None:
    region = HostRegion(HUGE_PAGE_BYTES)
    region.close()
    assert mapped(region.address) is None
    region.close()


def test_too_much_address_space_is_refused_with_its_size() -> None:
    with pytest.raises(PinError, match=r"cannot reserve 1.049e\+06 TiB .*ENOMEM") as caught:
        HostRegion(1 << 60)
    assert caught.value.reason == "out_of_memory"


def test_a_commit_that_fails_in_the_middle_revokes_access(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostRegion(PAGE_BYTES)
    monkeypatch.setattr(region_module, "libc", OldKernel(POPULATE, errno.ENOMEM))
    with pytest.raises(PinError, match="populating 4 KiB failed: ENOMEM"):
        region.commit(0, PAGE_BYTES)
    assert mapped(region.address) == "---p"
    region.close()


def test_a_system_call_that_fails_is_an_error_that_names_it() -> None:
    region = HostRegion(PAGE_BYTES)
    region.close()
    with pytest.raises(PinError, match=r"of 4 KiB failed: ENOMEM \(Cannot allocate memory\)"):
        region.commit(0, PAGE_BYTES)


def present(region: HostRegion, pages: int) -> bool:
    """Whether memory backs each of the first pages."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(region.address // PAGE_BYTES * 8)
        entries = memoryview(pagemap.read(pages * 8)).cast("Q")
    return all(entry >> 63 for entry in entries)


def test_an_old_kernel_that_cannot_populate_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "libc", OldKernel(POPULATE))
    region = HostRegion(4 * PAGE_BYTES)
    region.commit(0, 4 * PAGE_BYTES)
    assert present(region, 4)
    region.close()


def test_with_plenty_of_memory_pages_are_touched_and_no_thread_waits_for_the_address_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = OldKernel(POPULATE)
    monkeypatch.setattr(region_module, "libc", kernel)
    region = HostRegion(5 * HUGE_PAGE_BYTES + PAGE_BYTES)
    region.commit(0, region.num_bytes, plenty=True)
    assert POPULATE not in kernel.asked
    assert present(region, region.num_bytes // PAGE_BYTES)
    region.close()


def test_several_threads_touch_every_page_between_them() -> None:
    region = HostRegion(21 * HUGE_PAGE_BYTES + PAGE_BYTES)
    region.commit(0, region.num_bytes, plenty=True, threads=4)
    assert present(region, region.num_bytes // PAGE_BYTES)
    region.close()


def test_a_forked_child_does_not_inherit_the_memory() -> None:
    region = HostRegion(PAGE_BYTES)
    region.commit(0, PAGE_BYTES)
    with open("/proc/self/smaps") as smaps:
        text = smaps.read()
    own = text[text.index(f"{region.address:x}-") :]
    flags = own[own.index("VmFlags:") :].split("\n", 1)[0].split()
    assert "dc" in flags, "do not copy on fork"
    assert "hg" in flags or not os.path.exists("/sys/kernel/mm/transparent_hugepage"), "huge pages advised"
    region.close()
