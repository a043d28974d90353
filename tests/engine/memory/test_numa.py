from __future__ import annotations

import ctypes
import errno
import os

import pytest

from kvstow.memory import numa
from kvstow.memory.region import HostRegion


def policy_of(region: HostRegion) -> str:
    """The policy of the mapping, as the kernel shows it: "default", "prefer:0", ..."""
    with open("/proc/self/numa_maps") as maps:
        return next(line.split()[1] for line in maps if int(line.split()[0], 16) == region.address)


def test_the_kernel_is_told_of_the_node_or_says_why_not() -> None:
    region = HostRegion(1 << 21)
    try:
        notice = numa.prefer_node(region.address, region.num_bytes, 0)
        if notice is None:
            region.commit(0, region.num_bytes)
            assert policy_of(region).startswith("prefer") or policy_of(region) == "default"
        else:
            assert notice.startswith("the pool is not bound to NUMA node 0 of its device: ")
    finally:
        region.close()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_costs_a_notice(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    class Refusing:
        def syscall(self, *arguments: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(numa, "_libc", Refusing())
    notice = numa.prefer_node(4096, 4096, 1)
    assert notice is not None
    assert errno.errorcode[code] in notice


def test_the_system_call_gets_the_range_and_the_nodes_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    class Recording:
        def syscall(
            self, number: object, address: object, size: object, mode: object, mask: list[int], *rest: object
        ) -> int:
            values = [getattr(value, "value", 0) for value in (number, address, size, mode, *rest)]
            calls.append([*values, *[index for index, word in enumerate(mask) if word], max(mask)])
            return 0

    monkeypatch.setattr(numa, "_libc", Recording())
    monkeypatch.setattr(numa, "_MBIND", {os.uname().machine: 7})
    assert numa.prefer_node(8192, 4096, 70) is None
    assert calls == [[7, 8192, 4096, 1, 1025, 0, 1, 1 << 6]]


def test_a_node_or_machine_that_cannot_be_named_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there are nodes 0 to 1023" in str(numa.prefer_node(4096, 4096, 1024))
    monkeypatch.setattr(numa, "_MBIND", {})
    assert "not supported on" in str(numa.prefer_node(4096, 4096, 0))
