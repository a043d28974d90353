"""Memory of node services that processes have and no running service has, for `kvstow doctor`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

from kvstow.memory.extents import EXTENT_NAME
from kvstow_api.directory import OrphanedMemory
from kvstow_service.node.survival.keeper import PROCESS_NAME

_LINK = f"/memfd:{EXTENT_NAME} (deleted)"
_MAPPED = re.compile(rf"^\S+ \S+ \S+ (\S+) (\d+) +{re.escape(_LINK)}$", re.MULTILINE)
_PROGRAM = re.compile(rb"(^|/)(kvstow|kvstow_service|kvstow_service/__main__\.py)$")
_Extents = dict[tuple[int, int], int]
"""How many bytes each extent takes, as far as a descriptor shows it, by device and inode."""


def find_orphaned_memory(in_use: Collection[int], *, proc: Path = Path("/proc")) -> list[OrphanedMemory]:
    """Processes with extents that none of the processes `in_use` has. These are the running services, which hold all of
    theirs, and keepers, which hold what is their services' while these are away. It finds only processes that this one
    can see and inspect: in a container, usually those of the container. If it finds any, it looks again, because the
    keeper may show an extent before the service that is creating it does."""
    suspects = {extent for extents in _unused(in_use, proc).values() for extent in extents}
    if not suspects:
        return []
    found = []
    before: _Extents = {}
    for pid, extents in sorted(_unused(in_use, proc).items()):
        sizes = {extent: num_bytes for extent, num_bytes in extents.items() if extent in suspects}
        if sizes:
            added = sum(num_bytes for extent, num_bytes in sizes.items() if not before.get(extent))
            before |= {extent: num_bytes for extent, num_bytes in sizes.items() if num_bytes}
            found.append(OrphanedMemory(pid, _command(proc / str(pid)), len(sizes), added))
    return found


def _unused(in_use: Collection[int], proc: Path) -> dict[int, _Extents]:
    """By process: its extents that none of the processes `in_use` has."""
    by_pid = {int(path.name): extents_of(path) for path in proc.iterdir() if path.name.isdigit()}
    used = {extent for pid in in_use for extent in by_pid.get(pid, ())}
    return {pid: {one: size for one, size in extents.items() if one not in used} for pid, extents in by_pid.items()}


def running_services(*, proc: Path = Path("/proc")) -> list[int]:
    """The processes of `kvstow serve` on this machine, found by their command lines, their keepers, and this one. A
    keeper waits for a service of its own, which may be any on this machine, and ends by itself if none comes."""
    found = {os.getpid()}
    for path in proc.iterdir():
        if path.name.isdigit() and (_is_service(path) or _command(path) == PROCESS_NAME):
            found.add(int(path.name))
    return sorted(found)


def _is_service(process: Path) -> bool:
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word == b"serve" and _PROGRAM.search(before) for before, word in pairwise(arguments))


def extents_of(process: Path) -> _Extents:
    """What the process with this folder in /proc keeps alive."""
    extents: _Extents = dict.fromkeys(_mapped(process), 0)
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return extents
    for descriptor in descriptors:
        try:
            if os.readlink(descriptor) == _LINK:
                found = descriptor.stat()
                extents[found.st_dev, found.st_ino] = found.st_blocks * 512
        except OSError:
            continue
    return extents


def _mapped(process: Path) -> Iterator[tuple[int, int]]:
    try:
        text = (process / "maps").read_text(errors="replace")
    except OSError:
        return
    for device, inode in _MAPPED.findall(text):
        major, _, minor = device.partition(":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
