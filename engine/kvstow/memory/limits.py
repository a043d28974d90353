"""How much memory this process may still take: the machine's limit and those of its cgroups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvstow.bytesize import format_size

RESERVE_BYTES = 64 << 20  # always left to the rest of the cgroup and the machine

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why an amount of memory may not be taken. `reason` is one of `PinError.PIN_FAILURES`."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Headroom:
    """`num_bytes` may still be taken before `limit`, named in words, is reached."""

    num_bytes: int
    reason: str
    limit: str


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Reads the limits anew at each call. The paths are parameters for tests only."""

    meminfo: Path = Path("/proc/meminfo")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def headroom(self) -> Headroom | None:
        """The tightest limit, `RESERVE_BYTES` not yet taken off; None where no limit can be read."""
        found = [headroom for headroom in (self._machine(), *self._cgroups()) if headroom is not None]
        return min(found, key=lambda headroom: headroom.num_bytes, default=None)

    def shortage(self, num_bytes: int) -> Shortage | None:
        """What forbids to take `num_bytes` more; None where they fit."""
        tightest = self.headroom()
        if tightest is None or num_bytes + RESERVE_BYTES <= tightest.num_bytes:
            return None
        needs = f"{format_size(num_bytes)} are needed beside a reserve of {format_size(RESERVE_BYTES)}"
        return Shortage(tightest.reason, f"{needs}, but {tightest.limit}")

    def _machine(self) -> Headroom | None:
        available = _read_fields(self.meminfo).get("MemAvailable:")
        if available is None:
            return None
        num_bytes = available * 1024
        return Headroom(num_bytes, "out_of_memory", f"the machine has {format_size(num_bytes)} of memory available")

    def _cgroups(self) -> list[Headroom | None]:
        """The limits of this process's cgroups and of all above them: each of them can stop it."""
        headrooms = []
        for line in _read(self.own_cgroups).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                headrooms += [_headroom_v2(folder) for folder in _with_ancestors(self.cgroup_root, path)]
            elif "memory" in controllers.split(","):
                headrooms += [_headroom_v1(folder) for folder in _with_ancestors(self.cgroup_root / "memory", path)]
        return headrooms


def _with_ancestors(root: Path, path: str) -> list[Path]:
    """`root`/`path` up to `root`. In a container `path` can be the host's, and then only `root` exists."""
    relative = PurePosixPath(path.lstrip("/"))
    return [root / relative, *(root / parent for parent in relative.parents)]


def _headroom_v2(folder: Path) -> Headroom | None:
    return _headroom(folder, "memory.max", "memory.current", "inactive_file")


def _headroom_v1(folder: Path) -> Headroom | None:
    return _headroom(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _headroom(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Headroom | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _UNLIMITED:
        return None
    # Page cache that was not used lately is given up before the limit stops anybody.
    reclaimable = _read_fields(folder / "memory.stat").get(reclaimable_name, 0)
    num_bytes = max(0, int(limit) - int(usage) + reclaimable)
    words = (
        f"the cgroup limit {folder / limit_name} is {format_size(int(limit))}, "
        f"of which {format_size(num_bytes)} is left"
    )
    return Headroom(num_bytes, "cgroup_limit", words)


def _read(path: Path) -> str:
    """The file's text; empty where it cannot be read, which means that this limit does not exist here."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_fields(path: Path) -> dict[str, int]:
    """Lines of `name number`, as in /proc/meminfo and memory.stat."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
