"""Who may connect to the socket, and whose file it is."""

from __future__ import annotations

import grp
import os
import stat
import tempfile
from pathlib import Path

import pytest

from kvstow.errors import ConfigError, ConflictError
from kvstow_service.admin.sockets import group_id, runtime_folder
from kvstow_service.node.attach.attachserver import AttachSocket


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_and_its_folder_are_for_user_and_group(tmp_path: Path) -> None:
    path = tmp_path / "a" / "kvstow" / "attach.sock"
    before = os.umask(0o077)
    try:
        attach = AttachSocket(path, os.getgid())
    finally:
        os.umask(before)
    assert mode_of(path) == 0o660
    assert mode_of(path.parent) == 0o750
    assert path.stat().st_gid == path.parent.stat().st_gid == os.getgid()
    attach.close()
    attach.close()
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_group_owns_what_was_made(tmp_path: Path) -> None:
    path = tmp_path / "kvstow" / "attach.sock"
    attach = AttachSocket(path, 4242)
    assert path.stat().st_gid == path.parent.stat().st_gid == 4242
    attach.close()


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    AttachSocket(folder / "attach.sock").close()
    assert mode_of(folder) == 0o755


def test_a_folder_in_which_everybody_may_replace_the_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConflictError, match=r"can be written by everybody \(mode 777\).*with mode 750"):
        AttachSocket(folder / "attach.sock")
    folder.chmod(0o1777)
    AttachSocket(folder / "attach.sock").close()


def test_a_folder_in_which_a_group_may_replace_the_socket_is_refused(tmp_path: Path) -> None:
    """As the group of the engines could, and others would then attach at a service of theirs, or operators run it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o770)
    who = f"the group {folder.stat().st_gid}"
    with pytest.raises(ConflictError, match=rf"can be written by {who} \(mode 770\).*with mode 750"):
        AttachSocket(folder / "attach.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 4242, -1)
    with pytest.raises(ConflictError, match="belongs to uid 4242, who could replace the socket"):
        AttachSocket(folder / "attach.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "ours", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    AttachSocket(link / "attach.sock").close()
    os.chown(link, 4242, -1, follow_symlinks=False)
    with pytest.raises(ConflictError, match="belongs to uid 4242, who could replace the socket"):
        AttachSocket(link / "attach.sock")


def test_the_default_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    names = ("kvstow", "kvstow-node")
    assert runtime_folder(*names, {"XDG_RUNTIME_DIR": "/run/user/0"}) == Path("/run/kvstow")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert runtime_folder(*names, {"XDG_RUNTIME_DIR": "/run/user/1000"}) == Path("/run/user/1000/kvstow")
    assert runtime_folder(*names, {}) == Path(tempfile.gettempdir()) / "kvstow-node-1000"


def test_a_group_is_a_name_or_a_number() -> None:
    known = grp.getgrgid(os.getgid())
    assert group_id("admin_group", known.gr_name) == group_id("admin_group", str(known.gr_gid)) == os.getgid()
    with pytest.raises(ConfigError, match="admin_group is 'no-such-group'; allowed: the name or the number of a group"):
        group_id("admin_group", "no-such-group")
