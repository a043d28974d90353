from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.errors import ConflictError
from kvstow_service.admin.rendezvous import ADMIN, RANKS, Rendezvous
from kvstow_service.admin.sockets import AdminSockets

FOLDER = f"kvstow-{os.geteuid()}"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvstow-", dir="/tmp") as base:
        yield Path(base)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two places for the folder, the runtime directory before the one for temporary files."""
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def sockets() -> Iterator[AdminSockets]:
    sockets = AdminSockets()
    yield sockets
    sockets.close()


def publish(identity: str, environ: dict[str, str], sockets: AdminSockets) -> Rendezvous:
    """Both sockets of an engine."""
    host = Rendezvous(identity, environ)
    for suffix in (RANKS, ADMIN):
        host.publish(suffix, sockets.listen_unix)
    return host


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_agent_finds_what_was_published(environ: dict[str, str], sockets: AdminSockets, tmp_path: Path) -> None:
    agent = Rendezvous("engine_dp0", environ)
    assert agent() is None, "nobody has published yet"
    publish("engine_dp0", environ, sockets)
    assert agent() == tmp_path / "run" / FOLDER / "engine_dp0.ranks"
    assert Rendezvous("engine_dp1", environ)() is None
    sockets.close()
    assert agent() is None
    assert names(tmp_path / "run" / FOLDER) == set()


def test_sockets_are_accessible_only_to_the_user(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path
) -> None:
    publish("engine", environ, sockets)
    folder = tmp_path / "run" / FOLDER
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {FOLDER: 0o700, "engine.sock": 0o600, "engine.ranks": 0o600}


def test_publishing_waits_while_another_process_changes_the_folder(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / FOLDER
    folder.mkdir(mode=0o700)
    publishing = threading.Thread(target=publish, args=("engine", environ, sockets))
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    publishing.start()
    publishing.join(0.1)
    assert (publishing.is_alive(), names(folder)) == (True, set())
    os.close(other)
    publishing.join(60)
    assert Rendezvous("engine", environ)() is not None


def test_sockets_of_killed_hosts_are_ignored_replaced_and_removed(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path
) -> None:
    """But nothing of a living one."""
    folder = tmp_path / "run" / FOLDER
    folder.mkdir(0o700)
    for name in ("engine.ranks", "engine.sock", "another.ranks", "another.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
    living = AdminSockets()
    living.listen_unix(folder / "living.ranks")
    agent = Rendezvous("engine", environ)
    assert agent() is None
    publish("engine", environ, sockets)
    assert agent() == folder / "engine.ranks"
    assert names(folder) == {"engine.ranks", "engine.sock", "living.ranks"}
    living.close()


def test_a_folder_that_is_not_writable_is_named(
    sockets: AdminSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    gone = Rendezvous("engine", {"XDG_RUNTIME_DIR": str(tmp_path / "gone")})
    assert gone() is None
    with pytest.raises(ConflictError, match=r"for the engine.s sockets: .*gone.*set XDG_RUNTIME_DIR or TMPDIR"):
        gone.publish(RANKS, sockets.listen_unix)


def test_a_socket_that_cannot_be_made_gives_a_clear_error(environ: dict[str, str], sockets: AdminSockets) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConflictError, match=r"cannot publish the socket .*engine.ranks: .*No space left"):
        Rendezvous("engine", environ).publish(RANKS, full)
    publish("engine", environ, sockets)


def test_a_second_engine_with_the_same_identity_is_refused(environ: dict[str, str], sockets: AdminSockets) -> None:
    publish("engine", environ, sockets)
    second = AdminSockets()
    for suffix in (RANKS, ADMIN):
        with pytest.raises(ConflictError, match="another engine with the identity 'engine' listens"):
            Rendezvous("engine", environ).publish(suffix, second.listen_unix)
    second.close()
    assert Rendezvous("engine", environ)() is not None


@pytest.mark.parametrize("identity", ["e" * 300, "a/b", "..", "", "\N{SNOWMAN}"])
def test_any_text_is_an_identity(environ: dict[str, str], sockets: AdminSockets, identity: str) -> None:
    publish(identity, environ, sockets)
    found = Rendezvous(identity, environ)()
    assert found is not None
    assert found.parent.name == FOLDER
    assert Rendezvous(identity + "x", environ)() is None


def test_a_name_too_long_for_a_unix_socket_is_hashed(sockets: AdminSockets) -> None:
    room = 107 - len(f"/{FOLDER}/") - len(".ranks")
    with tempfile.TemporaryDirectory(prefix="kvstow-", dir="/tmp") as base:  # pytest's own folder may be too long
        for length, name in ((room - 20, "e" * 20), (room - 19, None)):
            parent = Path(base) / ("d" * (length - len(base) - 1))
            parent.mkdir()
            environ = {"XDG_RUNTIME_DIR": str(parent)}
            publish("e" * 20, environ, sockets)
            found = Rendezvous("e" * 20, environ)()
            assert found is not None
            assert len(str(found)) <= 107
            assert (found.stem == name) is (name is not None)


def refuse_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder look like another user's, which only root could really do."""
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        found = lstat(path)
        if path != folder:
            return found
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:]))

    monkeypatch.setattr(Path, "lstat", of_another)


def test_a_folder_of_another_user_is_not_used(
    environ: dict[str, str],
    sockets: AdminSockets,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next place is, by both sides; the agent says so once."""
    folder = tmp_path / "run" / FOLDER
    publish("engine", environ, sockets)
    refuse_owner(folder, monkeypatch)
    agent = Rendezvous("engine", environ)
    assert agent() is None
    assert agent() is None
    (record,) = caplog.records
    assert record.message.startswith(f"this rank does not look for its engine in that folder: runtime folder {folder} ")
    own = AdminSockets()
    publish("engine", environ, own)
    assert agent() == tmp_path / "tmp" / FOLDER / "engine.ranks"
    own.close()


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_an_accessible_folder_a_link_or_a_file_is_refused(
    sockets: AdminSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    folder = tmp_path / FOLDER
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o710)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
        folder.chmod(0o600)
    with pytest.raises(ConflictError, match=f"for the engine's sockets: .*runtime folder .*{FOLDER}"):
        publish("engine", environ, sockets)
    assert sockets.sockets == []
    assert Rendezvous("engine", environ)() is None


def test_without_the_variable_the_usual_runtime_directory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has the variable and a rank that has not must meet."""
    looked: list[Path] = []
    lstat = Path.lstat

    def spy(path: Path) -> os.stat_result:
        looked.append(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", spy)
    Rendezvous("engine", {})()
    assert looked[0] == Path(f"/run/user/{os.geteuid()}") / FOLDER
