"""The keeper as a process of its own, and services that die beside it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.service.node.keepers import end_keeper, look
from tests.service.node.survival.test_keeper import connect, contents

from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeper import ALREADY_RUNNING, LOCK, SOCKET, main, require_state_folder
from kvstow_service.node.survival.keeperclient import KeeperClient, start_keeper

pytestmark = pytest.mark.process

SERVICE = """
    import os, sys, time
    from pathlib import Path
    from kvstow_service.node.survival.keeperclient import KeeperClient, start_keeper
    from kvstow_service.node.survival.keeper import require_state_folder

    folder = require_state_folder(Path(sys.argv[1]))
    start_keeper(folder, float(sys.argv[2]))
    client = KeeperClient(folder)
    client.send_hello(str(os.getpid()))
    client.take_welcome()
    fd = os.memfd_create("kvstow-extent")
    os.write(fd, b"kv of the first service")
    client.put({"extent-1": fd})
    print("ready", flush=True)
    sys.stdin.read()
"""


class Service:
    """A service in a process group of its own, which has put an extent."""

    def __init__(self, folder: Path, environ: dict[str, str], keep_timeout: float) -> None:
        command = [sys.executable, "-c", textwrap.dedent(SERVICE), str(folder), str(keep_timeout)]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self, send: Callable[[int, int], None] = os.kill) -> None:
        send(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def wait_for_end(pid: int, seconds: float = 30) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder; its keeper is ended after the test."""
    yield tmp_path / "state"
    end_keeper(tmp_path / "state")


def start(folder: Path) -> KeeperClient:
    """A service at the keeper that is running, or at a new one."""
    start_keeper(require_state_folder(folder), 600)
    return connect(folder, str(os.urandom(4)))


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_memory_outlives_a_service_that_is_killed_also_with_its_process_group(
    folder: Path, child_environ: dict[str, str], send: Callable[[int, int], None]
) -> None:
    service = Service(folder, child_environ, 600)
    keeper = look(folder).pid
    service.kill(send)
    client = start(folder)
    assert client.pid == keeper, "it is the same one"
    assert contents(client) == {"extent-1": b"kv of the first service"}
    client.leave(gives_back=True)
    assert wait_for_end(keeper)
    assert not (folder / SOCKET).exists()


def test_services_that_start_at_once_have_one_keeper(folder: Path, child_environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kvstow_service.node.survival.keeper", str(folder), "600", "--daemon"]
    started = [subprocess.Popen(command, env=child_environ, stderr=subprocess.DEVNULL) for _ in range(6)]
    assert sorted(process.wait(30) for process in started) == [0, *[ALREADY_RUNNING] * 5]


def test_it_is_small_and_needs_no_large_module(folder: Path) -> None:
    client = start(folder)
    pid = client.pid
    fd = os.memfd_create("kvstow-extent")
    client.put({f"extent-{number}": fd for number in range(1000)})
    os.close(fd)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 24 << 10, "KiB"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in maps
    assert "torch" not in maps
    client.close()


def test_it_leads_a_session_of_its_own_and_holds_no_pipe_of_its_service(folder: Path) -> None:
    client = start(folder)
    pid = client.pid
    assert pid is not None
    assert os.getsid(pid) == pid != os.getsid(0)
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)] == [os.devnull] * 3
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    client.close()


def test_a_folder_that_it_cannot_use_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / LOCK).mkdir()
    with pytest.raises(KeeperError, match=r"does not start: .*Is a directory"):
        start_keeper(tmp_path / "state", 600)


def test_wrong_arguments_are_answered_by_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["x"], ["x", "y"], ["x", "-1"], ["x", "1", "--fork"]):
        assert main(arguments) == 2
    assert "STATE_FOLDER" in capsys.readouterr().err
