"""Checks the paths of `--disk` before the service starts.

Each path is checked by a process of its own, because a disk may hang. The service starts even then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.errors import ConfigError
from kvstow_service.stores.disk.diskfiles import FolderFacts, PathError, facts_of, open_folder
from kvstow_service.stores.disk.diskformat import MIN_ALIGNMENT

_SECONDS = 20.0
_MIN_BYTES = 64 << 20


class CheckedPath(NamedTuple):
    """A path that can be used, and the alignment of direct I/O there."""

    path: Path
    alignment: int = MIN_ALIGNMENT


def check_paths(paths: Sequence[Path], size_bytes: int | None) -> list[CheckedPath]:
    """Return the paths with their alignments. `size_bytes`: the size of each data file; None for the default. Raises
    `ConfigError` for a path that cannot be used."""
    if size_bytes is not None and size_bytes < _MIN_BYTES:
        raise ConfigError("disk_size", format_size(size_bytes), f"{format_size(_MIN_BYTES)} or more")
    for path in paths:
        if not path.is_absolute():
            raise ConfigError("disk", str(path), "an absolute path")
    facts = _look(paths)
    devices: dict[int, Path] = {}
    for path, one in zip(paths, facts, strict=True):
        if isinstance(one, str):
            raise ConfigError("disk", str(path), f"a folder that can be used: {one}")
        if one is None:  # it hangs
            continue
        if one.device in devices:
            raise ConfigError("disk", str(path), f"a file system of its own: {devices[one.device]} is on the same one")
        devices[one.device] = path
        _check_size(path, one, size_bytes)
    return [
        CheckedPath(path, MIN_ALIGNMENT if one is None or isinstance(one, str) else one.alignment)
        for path, one in zip(paths, facts, strict=True)
    ]


def _check_size(path: Path, facts: FolderFacts, size_bytes: int | None) -> None:
    if size_bytes is None:
        if facts.default_bytes is None:
            raise ConfigError("disk", str(path), "a disk of its own, or --disk-size: this is the root file system")
        if facts.default_bytes < _MIN_BYTES:
            raise ConfigError(
                "disk", str(path), f"a disk with free space: {format_size(max(0, facts.default_bytes))} may be used"
            )
    elif size_bytes > facts.free_bytes + facts.own_bytes:
        free = format_size(facts.free_bytes + facts.own_bytes)
        raise ConfigError("disk_size", format_size(size_bytes), f"at most the {free} that are free in {path}")


def _look(paths: Sequence[Path]) -> list[FolderFacts | str | None]:
    """Return for each path its facts, or a text that says what is wrong with it, or None if it hangs."""
    command = [sys.executable, "-m", "kvstow_service.stores.disk.startcheck"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    processes = [subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True, env=env) for path in paths]
    return [_result_of(process) for process in processes]


def _result_of(process: subprocess.Popen[str]) -> FolderFacts | str | None:
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # it ends when the disk goes on, for which this does not wait
        return None
    if process.returncode:
        return f"looking at it has failed with exit status {process.returncode}"
    found = json.loads(output)
    return found if isinstance(found, str) else FolderFacts(*found)


def main() -> None:
    try:
        fd = open_folder(Path(sys.argv[1]))
        found: object = list(facts_of(fd))
    except PathError as error:
        found = str(error)
    except OSError as error:
        found = os.strerror(error.errno or 0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
