"""Finds memory of node services that processes still have although no running service has it, for `kvstow doctor`."""

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
"""Sizes in bytes, by device and inode of the extents. A size is 0 if no descriptor shows it."""


def find_orphaned_memory(in_use: Collection[int], *, proc: Path = Path("/proc")) -> list[OrphanedMemory]:
    """Find processes that have extents which no process of `in_use` has. `in_use` are the running services and keepers:
    a service holds all of its extents, and a keeper holds them while its service is away. Processes are found only if
    this one can see and inspect them, which in a container are usually those of the container. If any is found, all are
    inspected once more, because a keeper may show a new extent before the service that creates it does."""
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
    """Return, by process, its extents that no process of `in_use` has."""
    by_pid = {int(path.name): extents_of(path) for path in proc.iterdir() if path.name.isdigit()}
    used = {extent for pid in in_use for extent in by_pid.get(pid, ())}
    return {pid: {one: size for one, size in extents.items() if one not in used} for pid, extents in by_pid.items()}


def running_services(*, proc: Path = Path("/proc")) -> list[int]:
    """Return this process, and the `kvstow serve` processes and keepers of this machine, which it recognizes by their
    command lines. A keeper counts even without a service. It may wait for one, and it ends by itself if none comes."""
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
    """Return the extents that this process keeps alive. `process` is its folder in /proc."""
    extents: _Extents = dict.fromkeys(_mapped(process), 0)
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # the process has ended, or belongs to another user
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
