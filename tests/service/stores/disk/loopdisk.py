"""A file system in an image, which is unmounted however the tests end."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

_SECONDS = 60

_KEEPER = """
mount -o loop "$1" "$2" && echo mounted
cat > /dev/null
fsfreeze --unfreeze "$2"
umount --lazy "$2"
rmdir "$2"
"""
"""The shell that mounts. `cat` ends when the other end of its standard input is closed: by `unmount`, or by the kernel
when the tests were killed."""


class LoopDiskError(Exception):
    """This machine cannot mount such an image."""


class LoopDisk:
    """A file system of its own in an image. Needs root and loop devices.

    `folder`: where it is mounted. It is beside pytest's temporary folders, not below them, because pytest removes old
    ones and cannot remove a mount."""

    def __init__(self, images: Path, file_system: str, num_bytes: int) -> None:
        """`images`: the folder that gets the image. Raises `LoopDiskError`."""
        self.image = images / f"{file_system}.img"
        with self.image.open("wb") as image:
            image.truncate(num_bytes)
        try:
            subprocess.run(["mkfs." + file_system, "-q", str(self.image)], check=True, capture_output=True)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            raise LoopDiskError(f"no {file_system} can be made: {error}") from error
        self.folder = Path(tempfile.mkdtemp(prefix="kvstow-loop-"))
        command = ["sh", "-c", _KEEPER, "sh", str(self.image), str(self.folder)]
        self._keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the group of the tests does not end it
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"mounted\n":
            self.unmount()
            raise LoopDiskError(f"no {file_system} can be mounted")

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.folder)], check=False, capture_output=True)

    def unmount(self) -> None:
        """Thaws it first. Idempotent."""
        self._keeper.communicate(timeout=_SECONDS)
