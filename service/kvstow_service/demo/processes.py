"""The processes of the demo: the service, and replays that attach to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 60.0
_COMMAND = (sys.executable, "-m", "kvstow_service")


class DemoError(Exception):
    """The demo cannot continue."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Raises `DemoError` after a minute."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {_DEADLINE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


class Service:
    """`kvstow serve` on temporary paths. It can be killed and started again, as a supervisor would."""

    def __init__(self, folder: Path, memory: str, flags: Sequence[str]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.socket = folder / "run" / "attach.sock"
        self.state = folder / "state"
        self.client = httpx.Client(base_url=self.url, timeout=10.0)
        self.started = 0.0
        self._log = folder / "service.log"
        self._arguments = [
            *_COMMAND,
            *("serve", "--memory", memory, "--attach-socket", str(self.socket), "--state", str(self.state)),
            *("--port", str(port), *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.started = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log)

    @property
    def milliseconds(self) -> float:
        """Since the process started."""
        return (time.monotonic() - self.started) * 1000

    def answers(self, probe: str) -> bool:
        """Whether a probe says 200. Raises `DemoError` if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise DemoError(f"the service has ended:\n{self._log.read_text()}")
        try:
            return self.client.get(probe).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def kill(self) -> None:
        """SIGKILL, from which nothing can be saved at the last moment."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status. Kills a process that does not exit."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Leave nothing behind, whatever has happened."""
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def left_behind(self) -> list[int]:
        """Its processes, once they have had time to end by themselves."""
        with suppress(DemoError):
            wait_until(lambda: not self.processes(), "the end of all processes")
        return self.processes()

    def processes(self) -> list[int]:
        """Processes on this machine whose command line names the folder of this demo's service."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.state).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
        return found


class Replay:
    """A `kvstow replay --attach` process: engines, each with its ranks."""

    def __init__(self, service: Service, trace: Path, *flags: str) -> None:
        attach = ("--attach", f"unix:{service.socket}")
        self._log = service.state.parent / "replay.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_COMMAND, "replay", str(trace), *attach, *flags, "--json"], stdout=subprocess.PIPE, stderr=log
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Wait for the end and return what the replay found. Raises `DemoError` if it has failed."""
        try:
            output, _ = self._process.communicate(timeout=_DEADLINE_SECONDS)
            found: dict[str, Any] = json.loads(output)
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise DemoError(f"a replay has no result ({error}):\n{self._log.read_text()}") from error
        return found

    def close(self) -> None:
        """End it if it has not ended; its engines and ranks end with it."""
        if not self.has_ended:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
