"""Paths that are refused before the start, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.service.stores.disk.loopdisk import LoopDisk

from kvstow.errors import ConfigError
from kvstow_service.stores.disk.startcheck import CheckedPath, check_paths

SIZE = 64 << 20


def refusal(*paths: Path, size: int | None = SIZE) -> str:
    with pytest.raises(ConfigError) as error:
        check_paths(paths, size)
    return str(error.value)


def test_a_folder_on_a_disk_is_accepted(disk_folder: Path) -> None:
    assert check_paths([disk_folder], SIZE) == [CheckedPath(disk_folder, 4096)]


def test_a_folder_that_is_not_there_a_file_and_a_link_are_refused(disk_folder: Path) -> None:
    assert "no such folder" in refusal(disk_folder / "nothing")
    (disk_folder / "file").write_bytes(b"")
    assert "not a folder" in refusal(disk_folder / "file")
    (disk_folder / "link").symlink_to(disk_folder)
    assert "symbolic link" in refusal(disk_folder / "link")
    (disk_folder / "kvstow").rmdir()
    (disk_folder / "kvstow").symlink_to("/tmp")
    assert "symbolic link" in refusal(disk_folder)


def test_other_file_systems_are_refused() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("there is no tmpfs")
    assert "tmpfs" in refusal(Path("/dev/shm"))


def test_the_folder_of_another_user_is_refused(disk_folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(disk_folder / "kvstow", 12345, 0)
    assert "belongs to uid 12345" in refusal(disk_folder)


def test_two_paths_on_one_file_system_are_refused(disk_folder: Path) -> None:
    for name in ("a", "b"):
        (disk_folder / name).mkdir()
    assert "a file system of its own" in refusal(disk_folder / "a", disk_folder / "b")


def test_a_folder_that_others_may_enter_is_closed_to_them(disk_folder: Path) -> None:
    (disk_folder / "kvstow").chmod(0o777)
    check_paths([disk_folder], SIZE)
    assert (disk_folder / "kvstow").stat().st_mode & 0o777 == 0o700


def test_the_root_file_system_needs_a_size(disk_folder: Path) -> None:
    if disk_folder.stat().st_dev != os.stat("/").st_dev:
        pytest.skip("this is another file system")
    assert "root file system" in refusal(disk_folder, size=None)


def test_more_than_is_free_is_refused_and_the_default_leaves_room(make_loop_disk: Callable[..., LoopDisk]) -> None:
    disk = make_loop_disk()
    assert "are free" in refusal(disk.folder, size=1 << 30)
    assert check_paths([disk.folder], None) == [CheckedPath(disk.folder, 4096)]


def test_a_tiny_size_is_refused(disk_folder: Path) -> None:
    assert "64 MiB or more" in refusal(disk_folder, size=1 << 20)
