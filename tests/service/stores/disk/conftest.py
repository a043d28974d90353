"""A folder on a file system that disks may have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.service.stores.disk.loopdisk import LoopDisk, LoopDiskError

from kvstow_service.stores.disk.diskfiles import PathError, open_folder


@pytest.fixture
def make_loop_disk(tmp_path: Path) -> Iterator[Callable[[str, int], LoopDisk]]:
    if os.geteuid():
        pytest.skip("only root mounts file systems")
    with ExitStack() as stack:

        def make(file_system: str = "ext4", num_bytes: int = 512 << 20) -> LoopDisk:
            try:
                disk = LoopDisk(tmp_path, file_system, num_bytes)
            except LoopDiskError as error:
                pytest.skip(str(error))
            stack.callback(disk.unmount)
            return disk

        yield make


@pytest.fixture
def disk_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    try:
        os.close(open_folder(tmp_path))
    except PathError:
        make: Callable[[], LoopDisk] = request.getfixturevalue("make_loop_disk")
        return make().folder
    return tmp_path
