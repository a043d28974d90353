from __future__ import annotations

import ctypes
import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.memory import region as numa
from kvstow.memory.region import HostRegion


def policy_of(region: HostRegion) -> str:
    """The policy of the mapping, as the kernel shows it: "default", "prefer:0", ..."""
    with open("/proc/self/numa_maps") as maps:
        return next(line.split()[1] for line in maps if int(line.split()[0], 16) == region.address)


def test_the_kernel_prefers_the_node_or_the_notice_says_why_not() -> None:
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
def test_a_refusal_of_the_kernel_becomes_a_notice(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    class Refusing:
        def syscall(self, *arguments: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(numa, "quick", Refusing())
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

    monkeypatch.setattr(numa, "quick", Recording())
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    assert numa.prefer_node(8192, 4096, 70) is None
    assert calls == [[237, 8192, 4096, 1, 1025, 0, 1, 1 << 6]]


def test_the_kernel_reports_the_node_of_every_sample_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostRegion(3 << 21)
    try:
        region.commit(0, region.num_bytes)
        assert sum(numa.bytes_by_node(region.address, region.num_bytes, 1 << 21).values()) in (0, region.num_bytes)
    finally:
        region.close()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="another"))
    assert numa.bytes_by_node(0, 1 << 21, 1 << 21) == {}


def test_bytes_are_counted_by_the_node_of_each_sampled_page(monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling:
        """Pages below 3 MiB are on node 0, others on node 1; above 8 MiB the call fails."""

        def syscall(self, number: object, node: Any, mask: object, bits: object, address: Any, flags: Any) -> int:
            assert flags.value == 3
            ctypes.cast(node, ctypes.POINTER(ctypes.c_int)).contents.value = int(address.value >= 3 << 20)
            return -1 if address.value >= 8 << 20 else 0

    monkeypatch.setattr(numa, "quick", Telling())
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    mib = 1 << 20
    assert numa.bytes_by_node(mib, 5 * mib, 2 * mib) == {0: 2 * mib, 1: 3 * mib}
    assert numa.bytes_by_node(mib, 9 * mib, 2 * mib) == {}


def test_a_node_or_machine_that_cannot_be_named_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there are nodes 0 to 1023" in str(numa.prefer_node(4096, 4096, 1024))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="another"))
    assert "not supported on" in str(numa.prefer_node(4096, 4096, 0))
