"""A folder on a file system that disks may have."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstow_service.stores.disk.diskfiles import PathError, open_folder


class LoopDisk:
    """A file system of its own in an image. Needs root and loop devices."""

    def __init__(self, folder: Path, file_system: str, num_bytes: int) -> None:
        self.image, self.folder = folder / f"{file_system}.img", folder / file_system
        self.folder.mkdir()
        with self.image.open("wb") as image:
            image.truncate(num_bytes)
        command = ["mkfs." + file_system, "-q", str(self.image)]
        subprocess.run(command, check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.folder)], check=True, capture_output=True)

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.folder)], check=False, capture_output=True)

    def unmount(self) -> None:
        self.thaw()
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)


@pytest.fixture
def make_loop_disk(tmp_path: Path) -> Iterator[Callable[[str, int], LoopDisk]]:
    if os.geteuid():
        pytest.skip("only root mounts file systems")
    with ExitStack() as stack:

        def make(file_system: str = "ext4", num_bytes: int = 512 << 20) -> LoopDisk:
            try:
                disk = LoopDisk(tmp_path, file_system, num_bytes)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                pytest.skip(f"no {file_system} can be mounted: {error}")
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
