"""`kvstow serve` as a process of its own: what only a process can show."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

from kvstow.attach.peer import overflow_uid

pytestmark = pytest.mark.process

MIB = 1 << 20

# 2 MiB an hour.
SLOW = ["--memory", "64MiB", "--pin-chunk", "2MiB", "--pin-pause", "1h"]


class Service:
    """A running `kvstow serve` and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, attach: Path) -> None:
        self.process, self.attach, self._log = process, attach, log
        eventually(lambda: self._address() or process.poll() is not None, "the address in the log")
        assert process.poll() is None, self.log()
        self.port = int(str(self._address()).rpartition(":")[2])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")

    def _address(self) -> str | None:
        found = re.search(r"admin server on (http://[\d.:]+)", self.log())
        return found and found[1]

    def log(self) -> str:
        return self._log.read_text()

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def readiness(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/v1/readiness").json()
        return answer

    def populated_bytes(self) -> int:
        return int(self.readiness()["memory"]["populated_bytes"])

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


Start = Callable[..., Service]


@pytest.fixture(autouse=True)
def heeded_interrupts() -> Iterator[None]:
    """A shell ignores SIGINT for what it runs in the background, and so would services: an ignored signal stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tmp_path: Path, child_environ: dict[str, str], stack: ExitStack) -> Start:
    numbers = count()

    def serve(*args: str, port: int = 0) -> Service:
        log, attach = tmp_path / f"log-{next(numbers)}", tmp_path / "node" / "attach.sock"
        command = [sys.executable, "-m", "kvstow_service", "serve", f"--port={port}", f"--attach-socket={attach}"]
        with log.open("wb") as stderr:
            process = subprocess.Popen([*command, *args], stderr=stderr, stdout=stderr, env=child_environ)
        stack.callback(process.wait)
        stack.callback(process.kill)
        service = Service(process, log, attach)
        stack.enter_context(service.client)
        return service

    return serve


def test_it_answers_at_once_and_populates_in_the_background(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uds, token = tmp_path / "admin" / "admin.sock", tmp_path / "token"
    token.write_text("open-sesame\n")
    began = time.monotonic()
    service = start(*SLOW, "--shutdown-delay=0", "--admin-socket", str(uds), "--token-file", str(token))
    eventually(lambda: service.status("/livez") == 200, "an answer")
    with capsys.disabled():
        print(f" [/livez after {time.monotonic() - began:.2f} s]", end="")
    assert service.readiness()["memory"]["target_bytes"] == 64 * MIB
    assert service.populated_bytes() < 64 * MIB
    for path in ("/readyz", "/startupz", "/health", "/healthz"):
        eventually(lambda path=path: service.status(path) == 200, path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (uds.parent, uds)] == [0o700, 0o600]
    assert stat.S_IMODE(service.attach.stat().st_mode) == 0o660
    assert stat.S_IMODE(service.attach.parent.stat().st_mode) == 0o750
    assert "process_resident_memory_bytes" in service.client.get("/metrics").text
    assert service.client.put("/v1/drain", json={}).status_code == 401
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://kvstow") as local:
        assert local.put("/v1/bypass", json={"load": True}).status_code == 200
    eventually(lambda: f"actor=uid:{os.geteuid()} " in service.log(), "the audit log")

    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "libcuda" not in maps

    assert service.end(signal.SIGTERM) == 0
    assert not uds.exists()
    assert not service.attach.exists()
    assert "Traceback" not in service.log()
    assert " ERROR " not in service.log()


CALLER = """
import os, socket, sys
uid, gid, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([]), os.setgid(gid), os.setuid(uid)
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect(path)
    except OSError as error:
        sys.exit(print(error.strerror))
    client.sendall(b"DELETE /v1/drain HTTP/1.1\\r\\nHost: kvstow\\r\\n\\r\\n")
    print(client.recv(100).split()[1].decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")
def test_the_admin_group_may_use_the_socket_and_nobody_else(start: Start, child_environ: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstow-test-") as folder:
        os.chmod(folder, 0o711)  # other users may pass, which tmp_path does not let them
        uds = Path(folder) / "admin" / "admin.sock"
        service = start(*SLOW, "--shutdown-delay=0", f"--admin-socket={uds}", "--admin-group=4242")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (uds.parent, uds)] == [0o750, 0o660]

        def answer(uid: int, gid: int) -> str:
            command = [sys.executable, "-c", CALLER, str(uid), str(gid), str(uds)]
            done = subprocess.run(command, env=child_environ, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip()

        assert answer(4711, 4242) == "200"
        assert answer(4711, 4711) == "Permission denied"
        assert answer(overflow_uid(), 4242) == "403"
        eventually(lambda: "actor=uid:4711 " in service.log(), "the audit log")
        assert service.end(signal.SIGTERM) == 0


def test_a_folder_that_cannot_be_used_does_not_stop_the_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    service = start(*SLOW, "--shutdown-delay=0", f"--admin-socket={tmp_path}/file/admin.sock")
    assert f"there is no admin socket, so changes need a token: cannot listen on unix:{tmp_path}/file" in service.log()
    assert "the server has no Unix socket" in service.client.put("/v1/drain", json={}).json()["detail"]
    assert service.end(signal.SIGTERM) == 0


def test_a_log_that_nobody_reads_stops_nothing(child_environ: dict[str, str], tmp_path: Path) -> None:
    """Every refusal at the attach socket logs a line on the thread that answers engines."""
    attach, uds = tmp_path / "run" / "attach.sock", tmp_path / "admin.sock"
    full, nobody_reads = os.pipe()
    fcntl.fcntl(nobody_reads, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(nobody_reads, False)
    with suppress(BlockingIOError):
        while os.write(nobody_reads, bytes(512)):
            pass
    os.set_blocking(nobody_reads, True)
    command = [sys.executable, "-m", "kvstow_service", "serve", "--port=0", "--shutdown-delay=0", *SLOW]
    command += [f"--attach-socket={attach}", f"--admin-socket={uds}"]
    process = subprocess.Popen(command, stderr=nobody_reads, env=child_environ)
    try:
        eventually(lambda: attach.is_socket(), "the attach socket")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://kvstow") as client:
            for count in (1, 2, 3):
                with socket.socket(socket.AF_UNIX) as nonsense:
                    nonsense.settimeout(30.0)
                    nonsense.connect(str(attach))
                    nonsense.sendall(b"GET / HTTP/1.1" + bytes(64))
                    nonsense.recv(1 << 16)
                eventually(lambda count=count: refusals(client) >= count, "a thread that answers engines")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.wait()
        os.close(full)
        os.close(nobody_reads)


def refusals(client: httpx.Client) -> int:
    return sum(client.get("/v1/sessions").json()["rejected"].values())


def test_a_second_service_on_the_socket_is_refused_and_the_first_goes_on(
    start: Start, child_environ: dict[str, str]
) -> None:
    first = start(*SLOW)
    command = [sys.executable, "-m", "kvstow_service", "serve", "--port=0", f"--attach-socket={first.attach}", *SLOW]
    second = subprocess.run(command, capture_output=True, text=True, env=child_environ, timeout=60, check=False)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1] == (
        f"kvstow serve: cannot listen on unix:{first.attach}: another process is listening there"
    )
    assert first.status("/livez") == 200
    assert first.attach.is_socket()


def test_a_killed_service_restarts_at_once_at_the_same_addresses(start: Start, tmp_path: Path) -> None:
    uds = tmp_path / "admin.sock"
    first = start(*SLOW, "--admin-socket", str(uds))
    eventually(lambda: first.status("/readyz") == 200, "readiness")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert uds.exists()
    assert first.attach.exists()

    second = start(*SLOW, "--admin-socket", str(uds), "--shutdown-delay", "10m", port=first.port)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as client:
        assert client.get("http://kvstow/livez").status_code == 200
    second.process.send_signal(signal.SIGTERM)
    eventually(lambda: second.status("/readyz") == 503, "a failing readiness")
    assert second.end(signal.SIGINT) == 0, "the first signal counts; the second one cuts its wait short"
