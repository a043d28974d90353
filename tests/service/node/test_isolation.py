"""Users, pid namespaces and cgroups: who may attach, who shares, and who is charged for the memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.node import isolatedengine

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

MIB, GIB = 1 << 20, 1 << 30
ALICE, BOB, ENGINES = 54321, 54322, 54399  # two users, and a group
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.current"),
)


class Cgroup:
    """A memory cgroup, of version 1 or 2. Skips the test where none can be made."""

    def __init__(self, name: str) -> None:
        for root, usage in _CGROUPS:
            self.path = root / f"kvstow-test-{os.getpid()}-{name}"
            try:
                self.path.mkdir()
            except OSError:
                continue
            self._usage = self.path / usage
            if self._usage.exists():
                return
            self.path.rmdir()
        pytest.skip("no memory cgroup can be made here")

    @property
    def used_bytes(self) -> int:
        return int(self._usage.read_text())

    def close(self) -> None:
        self.path.rmdir()


class Processes:
    """Services and engines, which end with the test."""

    def __init__(self, folder: Path, eventually: Any) -> None:
        self._folder, self._eventually = folder, eventually
        self.running = ExitStack()
        self.socket = folder / "node" / "attach.sock"
        python_path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
        self._environment = {"PYTHONPATH": os.pathsep.join(python_path), "PATH": os.environ["PATH"]}

    def serve(self, *options: str, prefix: tuple[str, ...] = (), cgroup: Cgroup | None = None) -> httpx.Client:
        """A client of its admin API, once it answers."""
        uds = self._folder / "admin.sock"
        command = [*prefix, sys.executable, "-m", "kvstow_service", "serve", "--attach-socket", str(self.socket)]
        command += ["--port", "0", "--uds", str(uds), "--shutdown-delay", "0s", *options]
        if cgroup is not None:
            join = f'echo $$ > {cgroup.path}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        self._start(command, stdout=None)
        client = self.running.enter_context(
            httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://k")
        )

        self._eventually(lambda: listens(uds) and is_open_to_the_group(self.socket))
        assert client.get("/livez").status_code == 200
        return client

    def engine(self, *options: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """The engine and what it has seen."""
        command = [sys.executable, isolatedengine.__file__, str(self.socket), *map(str, options)]
        process = self._start(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def _start(self, command: list[str], *, stdout: int | None) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=stdout, text=True, env=self._environment)
        self.running.callback(end, process)
        return process


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connecting:
        return connecting.connect_ex(str(path)) == 0


def is_open_to_the_group(path: Path) -> bool:
    return path.exists() and path.stat().st_mode & 0o777 == 0o660


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def processes(eventually: Any) -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for its user
        path = Path(folder)
        path.chmod(0o711)  # others reach the socket's folder, which alone decides
        made = Processes(path, eventually)
        with made.running:
            yield made


@pytest.fixture
def make_cgroup(processes: Processes) -> Callable[[str], Cgroup]:
    def make(name: str) -> Cgroup:
        cgroup = Cgroup(name)
        processes.running.callback(cgroup.close)
        return cgroup

    return make


def test_only_the_services_user_and_the_group_may_attach(processes: Processes) -> None:
    processes.serve("--memory", "16MiB", "--extent-size", "2MiB", "--attach-group", str(ENGINES))
    _, stranger = processes.engine("--uid", ALICE)
    assert "Permission denied" in stranger["problem"]
    _, member = processes.engine("--uid", ALICE, "--group", ENGINES, "--store", 4, "--find", 4)
    assert (member["problem"], member["found"]) == (None, 4)
    _, same_user = processes.engine("--store", 4, "--find", 4)
    assert (same_user["problem"], same_user["found"]) == (None, 4)


@pytest.mark.parametrize("shares", [False, True])
def test_users_share_blocks_only_if_the_operator_says_so(processes: Processes, shares: bool) -> None:
    options = ["--share-across-uids"] if shares else []
    admin = processes.serve("--memory", "32MiB", "--extent-size", "2MiB", "--attach-group", str(ENGINES), *options)
    _, alice = processes.engine("--uid", ALICE, "--group", ENGINES, "--store", 8, "--find", 8)
    _, bob = processes.engine("--uid", BOB, "--group", ENGINES, "--find", 8)
    assert alice["found"] == 8
    assert bob["found"] == (8 if shares else 0)
    assert (alice["pool"] == bob["pool"]) is shares
    assert len(admin.get("/v1/pools").json()["items"]) == (1 if shares else 2)


def test_a_service_in_a_pid_namespace_of_its_own_sees_engines_die(processes: Processes, eventually: Any) -> None:
    """As in containers: the engine's pid means nothing to the service."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    admin = processes.serve("--memory", "16MiB", "--extent-size", "2MiB", prefix=prefix)
    engine, seen = processes.engine("--store", 4)
    assert seen["problem"] is None
    (session,) = admin.get("/v1/sessions").json()["items"]
    assert session["state"] == "attached"
    engine.kill()
    eventually(lambda: admin.get("/v1/sessions").json()["items"] == [])
    _, successor = processes.engine("--find", 4)
    assert successor["found"] == 4


def test_the_service_is_charged_for_the_memory_and_the_engine_is_not(
    processes: Processes, make_cgroup: Callable[[str], Cgroup], eventually: Any
) -> None:
    memory = Path("/proc/meminfo").read_text()
    available = next(line for line in memory.splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) < 8 << 20:
        pytest.skip("needs 8 GiB of memory")
    service, engine = make_cgroup("service"), make_cgroup("engine")
    admin = processes.serve("--memory", "4GiB", cgroup=service)
    eventually(lambda: admin.get("/v1/readiness").json()["memory"]["populated_bytes"] == 4 * GIB, seconds=240)
    assert service.used_bytes >= 4 * GIB
    procs = engine.path / "cgroup.procs"
    _, small = processes.engine("--cgroup", procs)
    assert small["problem"] is None
    before = engine.used_bytes
    _, seen = processes.engine("--cgroup", procs, "--map", 2 * GIB)
    assert seen["problem"] is None
    grown = engine.used_bytes - before
    print(f"an engine and its two ranks, which have mapped 4 GiB, are charged {grown / MIB:.0f} MiB")
    assert grown <= 64 * MIB
