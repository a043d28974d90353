"""How much more memory this process may use: the limits of the machine and of its cgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from kvstow.bytesize import format_size
from kvstow.config import HugePages
from kvstow.errors import PinError
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES

RESERVE_BYTES = 64 << 20  # always left for the rest of the cgroup and the machine

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page
_ASKED_BYTES = 1 << 30  # a second of growth beside a busy host, which every file read disturbs
_PLENTY_BYTES = 2 << 30  # on top: more than other processes take in the 20 ms of populating a chunk
_VALID_SECONDS = 1.0  # pinning may pause for hours, while other processes take the memory


class Shortage(NamedTuple):
    """Why an amount of memory does not fit. `reason` is one of `PinError.PIN_FAILURES`."""

    reason: str
    message: str


class Headroom(NamedTuple):
    """`num_bytes` are left before `limit`, a description, is reached."""

    num_bytes: int
    reason: str
    limit: str


class _Files(NamedTuple):
    """File names of a cgroup: limit, usage, and what of the usage can be reclaimed, and is shared memory."""

    limit: str
    usage: str
    reclaimable: str = ""
    shared: str = ""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Reads the limits at each call. The paths are parameters for tests only."""

    reserve_bytes: ClassVar[int] = RESERVE_BYTES
    page_bytes: ClassVar[int] = PAGE_BYTES
    _what: ClassVar[str] = f"are needed beside a reserve of {format_size(RESERVE_BYTES)}"
    _controller: ClassVar[str] = "memory"
    _v1: ClassVar[_Files] = _Files(
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_shmem"
    )
    _v2: ClassVar[_Files] = _Files("memory.max", "memory.current", "inactive_file", "shmem")
    _cgroup_reason: ClassVar[str] = "cgroup_limit"

    meminfo: Path = Path("/proc/meminfo")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def headroom(self, *, beside_shared: bool = False) -> Headroom | None:
        """The tightest limit, before `reserve_bytes` is subtracted; None if no limit can be read.

        `beside_shared`: as if no shared memory were in use. So much can become free when the engines of an earlier
        service release its memory, or its keeper hands it over.
        """
        found = [headroom for headroom in self._limits(beside_shared) if headroom is not None]
        return min(found, key=lambda headroom: headroom.num_bytes, default=None)

    def shortage(self, num_bytes: int, *, beside_shared: bool = False) -> Shortage | None:
        """Why `num_bytes` more do not fit; None if they do."""
        tightest = self.headroom(beside_shared=beside_shared)
        if tightest is None or num_bytes + self.reserve_bytes <= tightest.num_bytes:
            return None
        return Shortage(tightest.reason, f"{format_size(num_bytes)} {self._what}, but {tightest.limit}")

    def _limits(self, beside_shared: bool) -> Iterator[Headroom | None]:
        """Of the machine, and of this process's cgroups and their ancestors, which all apply."""
        yield self._machine(beside_shared)
        for folder, files in self._cgroups():
            yield self._cgroup(folder, files, beside_shared)

    def total(self) -> int | None:
        """How much this machine has, or lets this process have, whatever is in use; None if that cannot be read. All
        processes of a container read the same."""
        found = [self._machine_total()]
        for folder, files in self._cgroups():
            limit = _read(folder / files.limit).strip()
            found.append(int(limit) if limit.isdecimal() and int(limit) < _UNLIMITED else None)
        return min((one for one in found if one is not None), default=None)

    def _machine_total(self) -> int | None:
        kib = _read_fields(self.meminfo).get("MemTotal:")
        return None if kib is None else kib * 1024

    def _cgroups(self) -> Iterator[tuple[Path, _Files]]:
        for line in _read(self.own_cgroups).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                root, files = self.cgroup_root, self._v2
            elif self._controller in controllers.split(","):
                root, files = self.cgroup_root / self._controller, self._v1
            else:
                continue
            # In a container `path` can be the host's; then only `root` exists.
            folder = PurePosixPath(path.lstrip("/"))
            for one in (folder, *folder.parents):
                yield root / one, files

    def _machine(self, beside_shared: bool) -> Headroom | None:
        fields = _read_fields(self.meminfo)
        available = fields.get("MemAvailable:")
        if available is None:
            return None
        num_bytes = (available + (fields.get("Shmem:", 0) if beside_shared else 0)) * 1024
        words = "available or shared" if beside_shared else "available"
        return Headroom(num_bytes, "out_of_memory", f"the machine has {format_size(num_bytes)} of memory {words}")

    def _cgroup(self, folder: Path, files: _Files, beside_shared: bool) -> Headroom | None:
        limit, usage = _read(folder / files.limit).strip(), _read(folder / files.usage).strip()
        if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _UNLIMITED:
            return None
        fields = _read_fields(folder / "memory.stat")
        # Inactive page cache is reclaimed before the limit is enforced.
        free = fields.get(files.reclaimable, 0) + (fields.get(files.shared, 0) if beside_shared else 0)
        num_bytes = max(0, int(limit) - int(usage) + free)
        words = (
            f"the cgroup limit {folder / files.limit} is {format_size(int(limit))}, "
            f"of which {format_size(num_bytes)} is left{' or shared' if beside_shared else ''}"
        )
        return Headroom(num_bytes, self._cgroup_reason, words)


@dataclass(frozen=True, slots=True)
class HugePageLimits(MemoryLimits):
    """Limits on the reserved 2 MiB pages, which count against no limit on other memory."""

    reserve_bytes: ClassVar[int] = 0
    page_bytes: ClassVar[int] = HUGE_PAGE_BYTES
    _what: ClassVar[str] = "are needed in reserved 2 MiB pages (huge_pages is reserved)"
    _controller: ClassVar[str] = "hugetlb"
    _v1: ClassVar[_Files] = _Files("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes")
    _v2: ClassVar[_Files] = _Files("hugetlb.2MB.max", "hugetlb.2MB.current")
    _cgroup_reason: ClassVar[str] = "hugepages"

    # Not /proc/meminfo, which counts pages of the default size: that may be 1 GiB.
    pages: Path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

    def _machine(self, beside_shared: bool) -> Headroom | None:
        names = ("nr_hugepages",) if beside_shared else ("free_hugepages", "resv_hugepages")
        found = [_read(self.pages / name).strip() for name in names]
        if not all(number.isdecimal() for number in found):
            return None
        pages, *promised = map(int, found)
        num_bytes = max(0, pages - sum(promised)) * HUGE_PAGE_BYTES
        words = "" if beside_shared else " free"
        words = f"the machine has {format_size(num_bytes)} of them{words} (sysctl vm.nr_hugepages reserves more)"
        return Headroom(num_bytes, "hugepages", words)

    def _machine_total(self) -> int | None:
        pages = _read(self.pages / "nr_hugepages").strip()
        return int(pages) * HUGE_PAGE_BYTES if pages.isdecimal() else None

    def _cgroup(self, folder: Path, files: _Files, beside_shared: bool) -> Headroom | None:
        limit = _read(folder / files.limit).strip()
        if not beside_shared or not limit.isdecimal() or int(limit) >= _UNLIMITED:
            return MemoryLimits._cgroup(self, folder, files, beside_shared)
        words = f"the cgroup limit {folder / files.limit} is {format_size(int(limit))}"
        return Headroom(int(limit), self._cgroup_reason, words)


def limits_of(huge_pages: HugePages) -> MemoryLimits:
    """The limits on a pool's memory."""
    return HugePageLimits() if huge_pages == "reserved" else MemoryLimits()


class Allowance:
    """How far a pool may grow. Checks the limits for many chunks at a time, because that reads a dozen files. Used by
    the pinning thread."""

    def __init__(self, shortage: Callable[[int], Shortage | None], clock: Callable[[], float]) -> None:
        """`shortage(num_bytes)` returns why that much more memory does not fit, or None."""
        self._shortage, self._clock = shortage, clock
        self._end = 0
        self._valid_until = 0.0
        self.is_plenty = False
        """Memory is so far from every limit that touching pages cannot invoke the OOM killer."""

    def require(self, start: int, end: int) -> None:
        """Check that the pool's bytes from `start` to `end` fit. Raises `PinError` if not."""
        if end <= self._end and self._clock() < self._valid_until:
            return
        asked = max(end - start, _ASKED_BYTES)
        self.is_plenty = self._shortage(asked + _PLENTY_BYTES) is None
        if self.is_plenty or self._shortage(asked) is None:
            self._end, self._valid_until = start + asked, self._clock() + _VALID_SECONDS
        elif shortage := self._shortage(end - start):
            raise PinError(shortage.reason, f"the next chunk does not fit: {shortage.message}")

    def forget(self) -> None:
        """Check again next time."""
        self._end = 0


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read, which means that there is no such limit."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_fields(path: Path) -> dict[str, int]:
    """Lines of `name number`, as in /proc/meminfo and memory.stat."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
