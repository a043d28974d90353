"""What lies behind a path: every link, folder and file that the kernel visits on the way to a file.

A link that is switched to older files, or an old folder that is renamed into place, changes no file. It does change the
trail of a path, so two equal trails mean that the path has led to the same bytes in between.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat as modes
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_MOST_LINKS = 40
"""How many links the kernel follows on one path."""


class Stamp(NamedTuple):
    """Identifies what is at a place: it changes if something else takes the place. The times are in nanoseconds.
    Programs can set `written`, but not `changed`. `size` is -1 for a folder."""

    device: int
    inode: int
    size: int
    written: int
    changed: int

    @property
    def is_folder(self) -> bool:
        return self.size < 0

    def may_differ_from(self, earlier: Stamp) -> bool:
        """Whether something else may have been at the place in between. A new entry changes both times of a folder;
        renaming the folder changes only the second."""
        if self.is_folder and self[:2] == earlier[:2]:
            return self.changed != earlier.changed and self.written == earlier.written
        return self != earlier


class Trail:
    """The stamps of all places on some paths, by place. The stamp is None if nothing is there."""

    def __init__(self, stamps: Mapping[str, Stamp | None]) -> None:
        self.stamps = stamps

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Trail:
        """Raises `OSError` for a path that cannot be followed, unless something on it does not exist."""
        stamps: dict[str, Stamp | None] = {}
        for path in paths:
            _follow(path, stamps)
        return cls(stamps)

    @property
    def digest(self) -> str:
        """A digest that is the same for equal trails, in all processes that see the same mounts."""
        text = ""
        for place, stamp in sorted(self.stamps.items()):
            text += f"{place}\0{stamp if stamp is None else stamp[:2] if stamp.is_folder else stamp[:]}\0"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def changed_place(self) -> str | None:
        """A place that has changed since; None if none has. Costs one `lstat` for each place."""
        return next((place for place, stamp in self.stamps.items() if _may_differ(stamp, stamp_of(place))), None)

    def differences(self, later: Trail) -> Iterator[str]:
        """The places whose stamp in `later` differs, and those that only one of both trails has."""
        for place in {**self.stamps, **later.stamps}:
            is_in_both = place in self.stamps and place in later.stamps
            if not is_in_both or _may_differ(self.stamps[place], later.stamps[place]):
                yield place

    def newer_than(self, moment: float) -> Iterator[str]:
        """The links and files that have changed after `moment`, in seconds since the epoch."""
        newest = moment * 1e9
        return (
            place for place, stamp in self.stamps.items() if stamp and not stamp.is_folder and stamp.changed > newest
        )

    def moved_after(self, moment: float) -> Iterator[str]:
        """The folders that were renamed after `moment` and have got no entry since, because a new entry sets both
        times."""
        newest = moment * 1e9
        for place, stamp in self.stamps.items():
            if stamp and stamp.is_folder and stamp.changed > newest and stamp.changed > stamp.written:
                yield place

    def folders_newer_than(self, moment: float, known: Trail, mounts: frozenset[str]) -> Iterator[str]:
        """The folders that may have been put there after `moment`.

        A folder's own time changes when it is renamed, but also when it gets an entry. So the time does not count if
        `known` has the same folder, or if the same file system is mounted on it as in `mounts`.
        """
        newest, kept = moment * 1e9, mounts & mount_points()
        for place, stamp in self.stamps.items():
            if stamp is None or not stamp.is_folder or stamp.changed <= newest:
                continue
            before = known.stamps.get(place)
            is_mount = any(mount.endswith(f" {place}") for mount in kept)
            if not is_mount and (before is None or stamp.may_differ_from(before)):
                yield place


def stamp_of(place: str | Path) -> Stamp | None:
    """The stamp of a place; None if nothing is there. A link is not followed."""
    try:
        found = os.lstat(place)
    except OSError:
        return None
    return _stamp(found)


def _stamp(found: os.stat_result) -> Stamp:
    size = -1 if modes.S_ISDIR(found.st_mode) else found.st_size
    return Stamp(found.st_dev, found.st_ino, size, found.st_mtime_ns, found.st_ctime_ns)


def _may_differ(earlier: Stamp | None, later: Stamp | None) -> bool:
    return earlier is not later if earlier is None or later is None else later.may_differ_from(earlier)


def mount_points() -> frozenset[str]:
    """One text for each mount of this process: its place, and what is mounted there. Empty if that is unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(" ".join(line.split(" ")[2:5]) for line in lines)  # device, root, mount point


def _follow(path: Path, stamps: dict[str, Stamp | None]) -> None:
    here, links = "/", 0
    left = os.path.join(os.getcwd(), path).split("/")[::-1]
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)  # `here` contains no link
            continue
        place = os.path.join(here, part)
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            stamps[place] = None
            return
        stamps[place] = _stamp(found)
        if modes.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = os.readlink(place)
            here = "/" if target.startswith("/") else here
            left += target.split("/")[::-1]
        else:
            here = place
