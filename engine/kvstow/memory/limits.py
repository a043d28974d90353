"""The limits on memory: how much more this process may use before the machine or a cgroup refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from kvstow.bytesize import format_size
from kvstow.config import HugePages
from kvstow.errors import PinError
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES

RESERVE_BYTES = 64 << 20
"""How many bytes a pool always leaves to the rest of the cgroup and the machine."""

_UNLIMITED = 1 << 60
"""A limit from here on is no limit: cgroup v1 writes the largest multiple of a page."""
_CHECKED_BYTES = 1 << 30
"""How much growth one check of the limits covers. Beside a busy host that is a second of growth. Each check reads a
dozen files, which disturbs the host."""
_PLENTY_BYTES = 2 << 30
"""Memory is plenty if this much more would fit: more than other processes take in the 20 ms of populating a chunk."""
_VALID_SECONDS = 1.0
"""How long a check is valid. Pinning may pause for hours, while other processes take the memory."""


class Shortage(NamedTuple):
    """Says why an amount of memory does not fit. `reason` is one of `PinError.PIN_FAILURES`."""

    reason: str
    message: str


class Headroom(NamedTuple):
    """How many bytes are left before a limit is reached. `limit` describes it, and `reason` is that of a `Shortage`."""

    num_bytes: int
    reason: str
    limit: str


class _CgroupNames(NamedTuple):
    """The files of a cgroup that hold the limit and the usage, and the fields of `memory.stat` that hold the
    reclaimable and the shared part of the usage."""

    limit: str
    usage: str
    reclaimable: str = ""
    shared: str = ""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits on memory of this process, which are read at each call. The paths are parameters for tests only."""

    reserve_bytes: ClassVar[int] = RESERVE_BYTES
    page_bytes: ClassVar[int] = PAGE_BYTES
    _need: ClassVar[str] = f"are needed beside a reserve of {format_size(RESERVE_BYTES)}"
    """The middle of the sentence of a `Shortage`, after the size."""
    _controller: ClassVar[str] = "memory"
    _v1: ClassVar[_CgroupNames] = _CgroupNames(
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_shmem"
    )
    _v2: ClassVar[_CgroupNames] = _CgroupNames("memory.max", "memory.current", "inactive_file", "shmem")
    _cgroup_reason: ClassVar[str] = "cgroup_limit"

    meminfo: Path = Path("/proc/meminfo")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def headroom(self, *, beside_shared: bool = False) -> Headroom | None:
        """Return the headroom below the tightest limit, before `reserve_bytes` is subtracted. None if no limit can be
        read.

        With `beside_shared`, memory in shared use counts as free. It can become free when the engines of an earlier
        service release its memory, or when its keeper hands it over.
        """
        found = [headroom for headroom in self._limits(beside_shared) if headroom is not None]
        return min(found, key=lambda headroom: headroom.num_bytes, default=None)

    def shortage(self, num_bytes: int, *, beside_shared: bool = False) -> Shortage | None:
        """Say why `num_bytes` more do not fit. Returns None if they fit."""
        tightest = self.headroom(beside_shared=beside_shared)
        if tightest is None or num_bytes + self.reserve_bytes <= tightest.num_bytes:
            return None
        return Shortage(tightest.reason, f"{format_size(num_bytes)} {self._need}, but {tightest.limit}")

    def _limits(self, beside_shared: bool) -> Iterator[Headroom | None]:
        """Yield the headroom of the machine, and of this process's cgroups and all their ancestors."""
        yield self._machine(beside_shared)
        for folder, names in self._cgroups():
            yield self._cgroup(folder, names, beside_shared)

    def total(self) -> int | None:
        """Return how many bytes the machine has, or the lowest limit of this process's cgroups if that is less. The
        usage does not matter, so all processes of a container get the same number. None if nothing can be read."""
        found = [self._machine_total()]
        for folder, names in self._cgroups():
            limit = _read(folder / names.limit).strip()
            found.append(int(limit) if limit.isdecimal() and int(limit) < _UNLIMITED else None)
        return min((one for one in found if one is not None), default=None)

    def _machine_total(self) -> int | None:
        kib = _read_fields(self.meminfo).get("MemTotal:")
        return None if kib is None else kib * 1024

    def _cgroups(self) -> Iterator[tuple[Path, _CgroupNames]]:
        """Yield the folder of each cgroup of this process and of its ancestors, with the names of its files."""
        for line in _read(self.own_cgroups).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                root, names = self.cgroup_root, self._v2
            elif self._controller in controllers.split(","):
                root, names = self.cgroup_root / self._controller, self._v1
            else:
                continue
            # In a container, `path` may be the path on the host. Then only `root` exists.
            folder = PurePosixPath(path.lstrip("/"))
            for one in (folder, *folder.parents):
                yield root / one, names

    def _machine(self, beside_shared: bool) -> Headroom | None:
        fields = _read_fields(self.meminfo)
        available = fields.get("MemAvailable:")
        if available is None:
            return None
        num_bytes = (available + (fields.get("Shmem:", 0) if beside_shared else 0)) * 1024
        words = "available or shared" if beside_shared else "available"
        return Headroom(num_bytes, "out_of_memory", f"the machine has {format_size(num_bytes)} of memory {words}")

    def _cgroup(self, folder: Path, names: _CgroupNames, beside_shared: bool) -> Headroom | None:
        limit, usage = _read(folder / names.limit).strip(), _read(folder / names.usage).strip()
        if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _UNLIMITED:
            return None
        fields = _read_fields(folder / "memory.stat")
        # The kernel reclaims inactive page cache before it enforces the limit.
        free = fields.get(names.reclaimable, 0) + (fields.get(names.shared, 0) if beside_shared else 0)
        num_bytes = max(0, int(limit) - int(usage) + free)
        words = (
            f"the cgroup limit {folder / names.limit} is {format_size(int(limit))}, "
            f"of which {format_size(num_bytes)} is left{' or shared' if beside_shared else ''}"
        )
        return Headroom(num_bytes, self._cgroup_reason, words)


@dataclass(frozen=True, slots=True)
class HugePageLimits(MemoryLimits):
    """The limits on reserved 2 MiB pages. These pages do not count against the limits on other memory."""

    reserve_bytes: ClassVar[int] = 0
    page_bytes: ClassVar[int] = HUGE_PAGE_BYTES
    _need: ClassVar[str] = "are needed in reserved 2 MiB pages (huge_pages is reserved)"
    _controller: ClassVar[str] = "hugetlb"
    _v1: ClassVar[_CgroupNames] = _CgroupNames("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes")
    _v2: ClassVar[_CgroupNames] = _CgroupNames("hugetlb.2MB.max", "hugetlb.2MB.current")
    _cgroup_reason: ClassVar[str] = "hugepages"

    # /proc/meminfo is of no use here: it counts pages of the default size, which may be 1 GiB.
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

    def _cgroup(self, folder: Path, names: _CgroupNames, beside_shared: bool) -> Headroom | None:
        limit = _read(folder / names.limit).strip()
        if not beside_shared or not limit.isdecimal() or int(limit) >= _UNLIMITED:
            return MemoryLimits._cgroup(self, folder, names, beside_shared)
        words = f"the cgroup limit {folder / names.limit} is {format_size(int(limit))}"
        return Headroom(int(limit), self._cgroup_reason, words)


def limits_of(huge_pages: HugePages) -> MemoryLimits:
    """Return the limits that apply to a pool's kind of pages."""
    return HugePageLimits() if huge_pages == "reserved" else MemoryLimits()


class Allowance:
    """Lets a pool grow while its memory fits. Each check of the limits reads a dozen files, so one check covers many
    chunks. Only the thread that populates uses it."""

    def __init__(self, shortage: Callable[[int], Shortage | None], clock: Callable[[], float]) -> None:
        """`shortage(num_bytes)` says why that much more memory does not fit, or returns None."""
        self._shortage, self._clock = shortage, clock
        self._end = 0
        """The pool may grow up to this byte without another check."""
        self._valid_until = 0.0
        self.is_plenty = False
        """The process is so far from every limit that touching pages cannot invoke the OOM killer."""

    def require(self, start: int, end: int) -> None:
        """Raise `PinError` if the pool's bytes from `start` to `end` do not fit."""
        if end <= self._end and self._clock() < self._valid_until:
            return
        checked = max(end - start, _CHECKED_BYTES)
        self.is_plenty = self._shortage(checked + _PLENTY_BYTES) is None
        if self.is_plenty or self._shortage(checked) is None:
            self._end, self._valid_until = start + checked, self._clock() + _VALID_SECONDS
        elif shortage := self._shortage(end - start):
            raise PinError(shortage.reason, f"the next chunk does not fit: {shortage.message}")

    def forget(self) -> None:
        """Check the limits again at the next `require`."""
        self._end = 0


def _read(path: Path) -> str:
    """Return the file's text. It is empty if the file cannot be read, because then there is no such limit."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_fields(path: Path) -> dict[str, int]:
    """Read a file of lines `name number`, such as /proc/meminfo or memory.stat."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
