from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.errors import PinError
from kvstow.memory.limits import RESERVE_BYTES, Allowance, Headroom, HugePageLimits, MemoryLimits, Shortage, limits_of

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def limits(tmp_path: Path) -> MemoryLimits:
    """A machine with 8 GiB available, and no cgroup yet."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n")
    return MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")


def write_v2(folder: Path, limit: str, current: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def headroom_of(limits: MemoryLimits) -> Headroom:
    headroom = limits.headroom()
    assert headroom is not None
    return headroom


def test_without_cgroups_the_machine_is_the_limit(limits: MemoryLimits) -> None:
    headroom = headroom_of(limits)
    assert (headroom.num_bytes, headroom.reason) == (8 * GIB, "out_of_memory")
    assert headroom.limit == "the machine has 8 GiB of memory available"


def test_the_own_cgroup_limits_and_its_inactive_page_cache_counts_as_free(limits: MemoryLimits) -> None:
    limits.own_cgroups.write_text("0::/pod/box\n")
    write_v2(limits.cgroup_root / "pod/box", str(4 * GIB), 3 * GIB, GIB)
    headroom = headroom_of(limits)
    assert (headroom.num_bytes, headroom.reason) == (2 * GIB, "cgroup_limit")
    assert "memory.max is 4 GiB, of which 2 GiB is left" in headroom.limit


def test_a_cgroup_above_with_less_left_is_the_limit(limits: MemoryLimits) -> None:
    limits.own_cgroups.write_text("0::/pod/box\n")
    write_v2(limits.cgroup_root / "pod/box", "max", GIB)
    write_v2(limits.cgroup_root / "pod", str(2 * GIB), GIB)
    assert headroom_of(limits).num_bytes == GIB


def test_in_a_container_the_root_is_the_own_cgroup(limits: MemoryLimits) -> None:
    limits.own_cgroups.write_text("0::/../../kubepods/pod7\n")
    write_v2(limits.cgroup_root, str(GIB), 0)
    assert headroom_of(limits).num_bytes == GIB


def test_usage_above_the_limit_leaves_nothing_rather_than_less(limits: MemoryLimits) -> None:
    limits.own_cgroups.write_text("0::/\n")
    write_v2(limits.cgroup_root, str(GIB), 2 * GIB)
    assert headroom_of(limits).num_bytes == 0


def test_version_1_of_cgroups_limits_too(limits: MemoryLimits) -> None:
    limits.own_cgroups.write_text("9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    folder = limits.cgroup_root / "memory/a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert headroom_of(limits).num_bytes == 2 * GIB
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert headroom_of(limits).reason == "out_of_memory", "that number means no limit"


def test_a_shortage_names_its_figures_and_keeps_a_reserve(limits: MemoryLimits) -> None:
    assert limits.shortage(8 * GIB - RESERVE_BYTES) is None
    shortage = limits.shortage(8 * GIB - RESERVE_BYTES + 1)
    assert shortage is not None
    assert shortage.reason == "out_of_memory"
    expected = "7.938 GiB are needed beside a reserve of 64 MiB, but the machine has 8 GiB of memory available"
    assert shortage.message == expected


def test_without_a_readable_limit_nothing_is_refused(tmp_path: Path) -> None:
    limits = MemoryLimits(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert limits.headroom() is None
    assert limits.shortage(1 << 50) is None


@pytest.fixture
def huge(limits: MemoryLimits, tmp_path: Path) -> HugePageLimits:
    """The same machine, which has 10 of its 2 MiB pages free, 4 of them promised, and next to no other memory."""
    limits.meminfo.write_text("MemAvailable: 1 kB\nHugePages_Total: 3\nHugepagesize: 1048576 kB\n")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/free_hugepages").write_text("10\n")
    (tmp_path / "pages/resv_hugepages").write_text("4\n")
    return HugePageLimits(limits.meminfo, limits.own_cgroups, limits.cgroup_root, tmp_path / "pages")


def test_reserved_huge_pages_are_counted_alone_and_without_a_reserve(huge: HugePageLimits) -> None:
    huge.own_cgroups.write_text("0::/pod\n")
    write_v2(huge.cgroup_root / "pod", str(MIB), MIB)
    assert huge.shortage(12 * MIB) is None, "neither other memory nor its cgroup counts"
    shortage = huge.shortage(12 * MIB + 1)
    assert shortage is not None
    assert shortage.reason == "hugepages"
    expected = (
        "14 MiB are needed in reserved 2 MiB pages (huge_pages is reserved), "
        "but the machine has 12 MiB of them free (sysctl vm.nr_hugepages reserves more)"
    )
    assert huge.shortage(14 * MIB) == Shortage("hugepages", expected)


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage"),
    [
        ("0::/pod\n", "pod", "hugetlb.2MB.max", "hugetlb.2MB.current"),
        ("7:hugetlb:/pod\n", "hugetlb/pod", "hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),
    ],
)
def test_a_cgroup_limits_reserved_huge_pages(
    huge: HugePageLimits, line: str, folder: str, limit: str, usage: str
) -> None:
    huge.own_cgroups.write_text(line)
    files = huge.cgroup_root / folder
    files.mkdir(parents=True)
    (files / limit).write_text(f"{8 * MIB}\n")
    (files / usage).write_text(f"{4 * MIB}\n")
    assert huge.shortage(4 * MIB) is None
    shortage = huge.shortage(6 * MIB)
    assert shortage is not None
    assert (shortage.reason, f"{limit} is 8 MiB, of which 4 MiB is left" in shortage.message) == ("hugepages", True)


def test_shared_memory_may_count_as_free_because_an_earlier_service_may_have_left_it(limits: MemoryLimits) -> None:
    limits.meminfo.write_text("MemAvailable: 2097152 kB\nShmem: 1048576 kB\n")
    found = limits.headroom(beside_shared=True)
    assert found == Headroom(3 * GIB, "out_of_memory", "the machine has 3 GiB of memory available or shared")
    assert headroom_of(limits).num_bytes == 2 * GIB
    limits.own_cgroups.write_text("0::/pod\n")
    write_v2(limits.cgroup_root / "pod", str(2 * GIB), 2 * GIB)
    with (limits.cgroup_root / "pod/memory.stat").open("a") as stat:
        stat.write(f"shmem {GIB}\n")
    assert limits.shortage(GIB - RESERVE_BYTES, beside_shared=True) is None
    assert limits.shortage(GIB, beside_shared=True) is not None
    assert headroom_of(limits).num_bytes == 0


def test_all_reserved_huge_pages_may_count_as_free(huge: HugePageLimits) -> None:
    (huge.pages / "nr_hugepages").write_text("20\n")
    assert huge.shortage(40 * MIB, beside_shared=True) is None
    shortage = huge.shortage(42 * MIB, beside_shared=True)
    assert shortage is not None
    assert "the machine has 40 MiB of them (sysctl" in shortage.message
    huge.own_cgroups.write_text("0::/pod\n")
    (huge.cgroup_root / "pod").mkdir(parents=True)
    (huge.cgroup_root / "pod/hugetlb.2MB.max").write_text(f"{30 * MIB}\n")
    (huge.cgroup_root / "pod/hugetlb.2MB.current").write_text(f"{30 * MIB}\n")
    assert huge.shortage(30 * MIB, beside_shared=True) is None
    assert huge.shortage(32 * MIB, beside_shared=True) is not None
    assert huge.shortage(2 * MIB) is not None


def test_the_limits_are_those_of_the_pages_that_a_pool_uses() -> None:
    assert limits_of("advised") == MemoryLimits()
    assert limits_of("reserved") == HugePageLimits()


def test_this_machine_has_a_readable_limit() -> None:
    assert headroom_of(MemoryLimits()).num_bytes > 0


# Allowance.

CHUNK = 64 * MIB


class Limits:
    """Limits that leave `num_bytes`; they remember what they were asked."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.clock = num_bytes, FakeClock()
        self.asked: list[int] = []
        self.allowance = Allowance(self._shortage, self.clock)

    def _shortage(self, num_bytes: int) -> Shortage | None:
        self.asked.append(num_bytes)
        return None if num_bytes <= self.num_bytes else Shortage("cgroup_limit", "no more is there")

    def require(self, *chunks: int) -> int:
        """How many questions these chunks take."""
        del self.asked[:]
        for number in chunks:
            self.allowance.require(number * CHUNK, (number + 1) * CHUNK)
        return len(self.asked)


@pytest.mark.parametrize(("left", "questions", "plenty"), [(3 * GIB, 1, True), (GIB, 2, False), (CHUNK, 24, False)])
def test_limits_are_read_for_many_chunks_at_once_unless_memory_is_short(
    left: int, questions: int, plenty: bool
) -> None:
    limits = Limits(left)
    assert limits.require(*range(8)) == questions
    assert limits.allowance.is_plenty is plenty


def test_a_chunk_that_does_not_fit_is_refused_with_the_reason() -> None:
    limits = Limits(CHUNK - 1)
    with pytest.raises(PinError, match="the next chunk does not fit: no more is there") as caught:
        limits.require(0)
    assert caught.value.reason == "cgroup_limit"


def test_plenty_expires() -> None:
    limits = Limits(4 * GIB)
    limits.require(0)
    limits.num_bytes = GIB  # others have taken it
    assert limits.require(1) == 0
    limits.clock.advance(1)
    assert limits.require(2) == 2
    assert not limits.allowance.is_plenty


def test_a_forgotten_allowance_is_checked_again() -> None:
    limits = Limits(4 * GIB)
    limits.require(0)
    limits.allowance.forget()
    assert limits.require(1) == 1
