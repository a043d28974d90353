from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstow.errors import ConflictError
from kvstow_service.admin.agent import AdminAddress, Rendezvous
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


def test_an_agent_finds_what_was_published(environ: dict[str, str], sockets: AdminSockets, tmp_path: Path) -> None:
    agent = Rendezvous("engine_dp0", environ)
    assert agent() is None, "nobody has published yet"
    host = Rendezvous("engine_dp0", environ)
    host.publish(sockets, "secret")
    path = tmp_path / "run" / FOLDER / "engine_dp0.sock"
    assert agent() == AdminAddress("http://kvstow", "secret", path)
    assert Rendezvous("engine_dp1", environ)() is None
    sockets.close()
    host.withdraw()
    host.withdraw()
    assert agent() is None
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []


def test_files_are_accessible_only_to_the_user(environ: dict[str, str], sockets: AdminSockets, tmp_path: Path) -> None:
    Rendezvous("engine", environ).publish(sockets, "secret")
    folder = tmp_path / "run" / FOLDER
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {FOLDER: 0o700, "engine.sock": 0o600, "engine.token": 0o600}


def test_the_token_is_written_before_the_socket_listens(
    environ: dict[str, str], sockets: AdminSockets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(sockets, "listen_unix", lambda path: tokens.append(path.with_suffix(".token").read_text()))
    Rendezvous("engine", environ).publish(sockets, "secret")
    assert tokens == ["secret"]


def test_publishing_waits_while_another_process_changes_the_folder(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / FOLDER
    folder.mkdir(mode=0o700)
    publishing = threading.Thread(target=Rendezvous("engine", environ).publish, args=(sockets, "secret"))
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    publishing.start()
    publishing.join(0.1)
    assert (publishing.is_alive(), list(folder.iterdir())) == (True, [])
    os.close(other)
    publishing.join(60)
    assert Rendezvous("engine", environ)() is not None


def test_files_of_a_killed_host_are_ignored_and_replaced(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / FOLDER
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "engine.sock"))
    (folder / "engine.token").write_text("of the dead")
    agent = Rendezvous("engine", environ)
    assert agent() is None
    Rendezvous("engine", environ).publish(sockets, "of the living")
    found = agent()
    assert found is not None
    assert found.token == "of the living"


_HOST = """
import os, sys, time
from pathlib import Path
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.agent import Rendezvous
Rendezvous(sys.argv[1], {"XDG_RUNTIME_DIR": sys.argv[2]}).publish(AdminSockets(), "of the dead")
print("published", flush=True)
time.sleep(600)
"""


def test_files_of_killed_hosts_with_other_identities_are_removed(
    environ: dict[str, str], sockets: AdminSockets, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    """But nothing of a living one, and not even where it does not listen yet."""
    folder = tmp_path / "run" / FOLDER
    command = [sys.executable, "-c", _HOST, "killed", environ["XDG_RUNTIME_DIR"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environ) as host, ExitStack() as stack:
        stack.callback(host.kill)
        assert host.stdout is not None
        assert host.stdout.readline() == "published\n"
        starting, others = Rendezvous("starting", environ), AdminSockets()
        starting.publish(others, "secret")
        others.close()
        assert {path.name for path in folder.iterdir()} == {"killed.sock", "killed.token", "starting.token"}
    (folder / ".half.token.0123").write_text("half a tok")
    Rendezvous("engine", environ).publish(sockets, "secret")
    assert {path.name for path in folder.iterdir()} == {"starting.token", "engine.sock", "engine.token"}
    starting.withdraw()
    assert {path.name for path in folder.iterdir()} == {"engine.sock", "engine.token"}


def test_a_folder_that_is_not_writable_is_named(
    sockets: AdminSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    gone = Rendezvous("engine", {"XDG_RUNTIME_DIR": str(tmp_path / "gone")})
    assert gone() is None
    with pytest.raises(ConflictError, match=r"no folder for the socket.*gone.*set XDG_RUNTIME_DIR or TMPDIR"):
        gone.publish(sockets, "secret")


def test_a_file_that_cannot_be_written_gives_a_clear_error(
    environ: dict[str, str], sockets: AdminSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            ConflictError, match=r"cannot publish the admin server.s address to agents: .*No space left"
        ):
            Rendezvous("engine", environ).publish(sockets, "secret")
    assert sockets.sockets == []
    Rendezvous("engine", environ).publish(sockets, "secret")


def test_a_second_engine_with_the_same_identity_is_refused(environ: dict[str, str], sockets: AdminSockets) -> None:
    Rendezvous("engine", environ).publish(sockets, "first")
    second, others = Rendezvous("engine", environ), AdminSockets()
    with pytest.raises(ConflictError, match="another engine with the identity 'engine' listens"):
        second.publish(others, "second")
    second.withdraw()
    others.close()
    found = Rendezvous("engine", environ)()
    assert found is not None
    assert found.token == "first"


def test_the_token_of_a_successor_stays(environ: dict[str, str], sockets: AdminSockets) -> None:
    first = Rendezvous("engine", environ)
    first.publish(sockets, "first")
    sockets.close()
    successors = AdminSockets()
    Rendezvous("engine", environ).publish(successors, "second")
    first.withdraw()
    found = Rendezvous("engine", environ)()
    assert found is not None
    assert found.token == "second"
    successors.close()


@pytest.mark.parametrize("identity", ["e" * 300, "a/b", "..", "", "\N{SNOWMAN}"])
def test_any_text_is_an_identity(environ: dict[str, str], sockets: AdminSockets, identity: str) -> None:
    Rendezvous(identity, environ).publish(sockets, "secret")
    found = Rendezvous(identity, environ)()
    assert found is not None
    assert found.uds is not None
    assert found.uds.parent.name == FOLDER
    assert Rendezvous(identity + "x", environ)() is None


def test_a_name_too_long_for_a_unix_socket_is_hashed(sockets: AdminSockets) -> None:
    room = 107 - len(f"/{FOLDER}/") - len(".sock")
    with tempfile.TemporaryDirectory(prefix="kvstow-", dir="/tmp") as base:  # pytest's own folder may be too long
        for length, name in ((room - 20, "e" * 20), (room - 19, None)):
            parent = Path(base) / ("d" * (length - len(base) - 1))
            parent.mkdir()
            environ = {"XDG_RUNTIME_DIR": str(parent)}
            Rendezvous("e" * 20, environ).publish(sockets, "secret")
            found = Rendezvous("e" * 20, environ)()
            assert found is not None
            assert found.uds is not None
            assert len(str(found.uds)) <= 107
            assert (found.uds.stem == name) is (name is not None)


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
    Rendezvous("engine", environ).publish(sockets, "of another user")
    refuse_owner(folder, monkeypatch)
    agent = Rendezvous("engine", environ)
    assert agent() is None
    assert agent() is None
    (record,) = caplog.records
    assert record.message.startswith(f"not looking for the admin server there: runtime folder {folder} belongs to ")
    own = AdminSockets()
    Rendezvous("engine", environ).publish(own, "mine")
    found = agent()
    assert found is not None
    assert (found.token, found.uds) == ("mine", tmp_path / "tmp" / FOLDER / "engine.sock")
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
    with pytest.raises(
        ConflictError,
        match=f"no folder for the socket by which agents find the admin server: .*runtime folder .*{FOLDER}",
    ):
        Rendezvous("engine", environ).publish(sockets, "secret")
    assert sockets.sockets == []
    assert Rendezvous("engine", environ)() is None


def test_a_missing_runtime_directory_is_skipped(environ: dict[str, str], sockets: AdminSockets, tmp_path: Path) -> None:
    environ["XDG_RUNTIME_DIR"] = str(tmp_path / "gone")
    Rendezvous("engine", environ).publish(sockets, "secret")
    found = Rendezvous("engine", environ)()
    assert found is not None
    assert found.uds == tmp_path / "tmp" / FOLDER / "engine.sock"


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
