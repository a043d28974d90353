from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.memory.measured import smaps_bytes
from tests.engine.memory.oldkernel import OldKernel

from kvstow.errors import ConfigError, ForeignMemoryError, PinError
from kvstow.memfd import create_memfd
from kvstow.memory import extents as extents_module
from kvstow.memory.extents import STEP_BYTES, Extent, Window
from kvstow.memory.limits import HugePageLimits

MIB = 1 << 20


@pytest.fixture
def window() -> Iterator[Window]:
    window = Window()
    yield window
    window.close()


@pytest.fixture
def extent() -> Iterator[Extent]:
    extent = Extent.create(8 * MIB)
    yield extent
    extent.close()


def never() -> bool:
    return False


def resident(extent: Extent) -> int:
    return os.fstat(extent.fd).st_blocks * 512


def huge_bytes(extent: Extent) -> int:
    """How much of the extent a new mapping of it, as a client makes, holds in huge pages."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    with mmap.mmap(-1, extent.num_bytes + 2 * MIB) as room:
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        address = -(-start // (2 * MIB)) * 2 * MIB
        assert libc.mmap(address, extent.num_bytes, 3, 0x11, extent.fd, 0) == address
        ctypes.string_at(address, extent.num_bytes)  # touches every page
        found = smaps_bytes(address, address + extent.num_bytes, "ShmemPmdMapped")
        libc.mmap(address, extent.num_bytes, 0, 0x32, -1, 0)
    return found


def can_collapse() -> bool:
    window, extent = Window(), Extent.create(2 * MIB)
    try:
        window.populate(extent, 0, 2 * MIB, never)
        return not window.notices
    finally:
        extent.close()
        window.close()


needs_collapse = pytest.mark.skipif(not can_collapse(), reason="the kernel makes no huge pages of shared memory")


def test_an_extent_takes_no_memory_until_it_is_populated(window: Window, extent: Extent) -> None:
    assert resident(extent) == 0
    assert window.populate(extent, 0, 4 * MIB, never) is not None
    assert resident(extent) == 4 * MIB


@needs_collapse
def test_it_lies_in_huge_pages_whatever_the_machine_s_setting_says(window: Window, extent: Extent) -> None:
    assert window.populate(extent, 0, 8 * MIB, never) == 0
    assert huge_bytes(extent) == 8 * MIB


def test_this_process_keeps_no_mapping_of_it(window: Window, extent: Extent) -> None:
    window.populate(extent, 0, 8 * MIB, never)
    assert "kvstow-extent" not in Path("/proc/self/maps").read_text()


def test_while_it_is_mapped_a_child_does_not_inherit_it(window: Window, extent: Extent) -> None:
    flags = []

    def stop() -> bool:
        with open("/proc/self/smaps") as smaps:
            text = smaps.read()
        mapping = text[text.index("kvstow-extent") :]
        flags.append(mapping[mapping.index("VmFlags") :].splitlines()[0])
        return True

    assert window.populate(extent, 0, 2 * MIB, stop) is None
    assert " dc " in flags[0] + " ", "no copy on fork"


def test_bytes_that_are_there_stay(window: Window, extent: Extent) -> None:
    with mmap.mmap(extent.fd, 8 * MIB) as memory:
        memory[5 * MIB : 5 * MIB + 4] = b"kept"
        window.populate(extent, 0, 8 * MIB, never)
        assert memory[5 * MIB : 5 * MIB + 4] == b"kept"
    assert resident(extent) == 8 * MIB


def test_populating_stops_between_two_pieces(window: Window) -> None:
    extent, asked = Extent.create(64 * MIB), []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert window.populate(extent, 0, 64 * MIB, stop) is None
    assert resident(extent) == 32 * MIB
    extent.close()


def test_a_kernel_that_makes_no_huge_pages_is_in_the_log_once(
    window: Window, extent: Extent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_kernel(monkeypatch, OldKernel(25))
    assert window.populate(extent, 0, 8 * MIB, never) == resident(extent) == 8 * MIB
    assert window.populate(extent, 0, 8 * MIB, never) == 8 * MIB
    (line,) = caplog.messages
    assert window.notices == {line}
    assert "4 KiB pages" in line
    assert "Linux 6.1" in line


def test_a_kernel_that_cannot_populate_gets_the_memory_by_another_call(
    window: Window, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_kernel(monkeypatch, OldKernel(23))
    assert window.populate(extent, 0, 8 * MIB, never) is not None
    assert resident(extent) == 8 * MIB


def replace_kernel(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    for name in ("libc", "quick"):
        monkeypatch.setattr(extents_module, name, kernel)


def test_pages_that_cannot_be_made_huge_are_counted(
    window: Window, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_kernel(monkeypatch, OldKernel(25, errno.EAGAIN))
    assert window.populate(extent, 0, 8 * MIB, never) == 8 * MIB
    (notice,) = window.notices
    assert "EAGAIN" in notice


def test_memory_that_the_machine_refuses_is_an_error_and_nothing_stays_mapped(
    window: Window, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_kernel(monkeypatch, OldKernel(23, errno.EFAULT, first=2))
    with pytest.raises(PinError, match=r"populating .* failed: EFAULT") as caught:
        window.populate(extent, 0, 8 * MIB, never)
    assert caught.value.reason == "out_of_memory"
    assert "kvstow-extent" not in Path("/proc/self/maps").read_text()


def test_reserved_huge_pages_that_are_missing_are_an_error_with_its_own_reason(window: Window) -> None:
    if int((HugePageLimits().pages / "free_hugepages").read_text()):
        pytest.skip("the machine has reserved huge pages")
    extent = Extent.create(2 * MIB, "reserved")
    with pytest.raises(PinError, match="no reserved 2 MiB page left") as caught:
        window.populate(extent, 0, 2 * MIB, never)
    assert caught.value.reason == "hugepages"
    extent.close()


def test_an_extent_in_reserved_huge_pages(window: Window, reserve: Callable[[int], None]) -> None:
    reserve(4)
    before = int((HugePageLimits().pages / "free_hugepages").read_text())
    extent = Extent.create(8 * MIB, "reserved")
    assert window.populate(extent, 0, 4 * MIB, never) == 0
    assert resident(extent) == 4 * MIB
    adopted = Extent.adopt(os.dup(extent.fd), 8 * MIB, "reserved")
    assert adopted.populated_bytes == 0, "less than a step"
    window.populate(extent, 4 * MIB, 8 * MIB, never)
    again = Extent.adopt(os.dup(extent.fd), 8 * MIB, "reserved")
    assert again.populated_bytes == 8 * MIB
    for one in (extent, adopted, again):
        one.close()
    assert int((HugePageLimits().pages / "free_hugepages").read_text()) == before


def test_memory_prefers_the_node_or_says_why_it_cannot(window: Window) -> None:
    extent = Extent.create(2 * MIB, numa_node=0)
    window.populate(extent, 0, 2 * MIB, never)
    assert not any("NUMA node 1023" in notice for notice in window.notices)
    extent.close()
    nowhere = Extent.create(2 * MIB, numa_node=1023)
    window.populate(nowhere, 0, 2 * MIB, never)
    assert any("NUMA node 1023" in notice for notice in window.notices), "and it has its memory"
    assert resident(nowhere) == 2 * MIB
    nowhere.close()


def test_extents_of_two_nodes_in_turns_do_not_fill_the_log(window: Window, caplog: pytest.LogCaptureFixture) -> None:
    extents = [Extent.create(4 * MIB, numa_node=node) for node in (1022, 1023)]
    for start in (0, 2 * MIB):
        for extent in extents:
            window.populate(extent, start, start + 2 * MIB, never)
    refusals = [line for line in caplog.messages if "NUMA node" in line]
    assert ["1022" in line for line in refusals] == [True, False], "each reason once"
    for extent in extents:
        extent.close()


def test_an_adopted_extent_is_usable_up_to_its_first_gap_in_whole_steps(window: Window) -> None:
    extent = Extent.create(3 * STEP_BYTES)
    window.populate(extent, 0, STEP_BYTES, never)
    window.populate(extent, STEP_BYTES, STEP_BYTES + 2 * MIB, never)
    adopted = Extent.adopt(os.dup(extent.fd), 3 * STEP_BYTES, identity=extent.identity)
    assert adopted.populated_bytes == STEP_BYTES
    extent.close()
    assert resident(adopted) == STEP_BYTES + 2 * MIB, "the memory is there as long as one descriptor is"
    adopted.close()


def test_memory_of_others_is_not_adopted_and_stays_theirs(extent: Extent) -> None:
    other = create_memfd("kvstow-extent", 8 * MIB)
    with pytest.raises(ForeignMemoryError):
        Extent.adopt(other, 8 * MIB, identity=extent.identity)
    os.close(other)


def test_closing_gives_the_memory_back_and_may_come_twice(window: Window) -> None:
    extent = Extent.create(64 * MIB)
    window.populate(extent, 0, 64 * MIB, never)
    identity = extent.identity
    extent.close()
    extent.close()
    assert extent.fd < 0
    assert identity.inode not in {fd.stat().st_ino for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


@pytest.mark.parametrize("size", [0, -2 * MIB, MIB, 2 * MIB + 4096])
def test_only_whole_huge_pages_are_an_extent(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 2 MiB"):
        Extent.create(size)
