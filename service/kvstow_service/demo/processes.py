"""The processes of the demo: the service, and engines that attach to it and replay a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from kvstow.errors import KvstowError
from kvstow_service.replay.launcher import EngineLauncher, EngineSpec
from kvstow_service.replay.result import AttachedResult

_POLL_SECONDS = 0.02
DEADLINE_SECONDS = 300.0
"""The longest wait for any event of the demo. No healthy run comes near, even on a slow machine."""
_FOREVER_SECONDS = 3600.0


class DemoError(Exception):
    """The demo cannot continue."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds. Raises `DemoError`, which begins with `what`, after `DEADLINE_SECONDS`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {DEADLINE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


class Service:
    """`kvstow serve` on temporary paths. It can be killed and started again, as a supervisor would."""

    def __init__(self, folder: Path, memory: str, flags: Sequence[str]) -> None:
        self.socket = folder / "run" / "attach.sock"
        self.state = folder / "state"
        port = _free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_SECONDS)
        self.started = 0.0
        self._log = folder / "service.log"
        self._arguments = [
            *(sys.executable, "-m", "kvstow_service", "serve"),
            *("--memory", memory, "--attach-socket", str(self.socket), "--state", str(self.state)),
            *("--port", str(port), *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Start the service. `flags`: additional flags for this process only."""
        self.started = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._arguments, *flags], stdout=log, stderr=log)

    @property
    def milliseconds(self) -> float:
        """How many milliseconds ago the process was started."""
        return (time.monotonic() - self.started) * 1000

    def answers(self, probe: str) -> bool:
        """Whether the service answers a probe with status 200. Raises `DemoError` if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise DemoError(f"the service has ended:\n{self._log.read_text()}")
        try:
            return self.client.get(probe).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def has_registered(self, pid: int) -> bool:
        """Whether the engine with this process id is attached, and its ranks have registered all memory of its pool."""
        try:
            sessions, pools = self.get("/v1/sessions")["items"], self.get("/v1/pools")["items"]
        except httpx.HTTPError:  # the service was killed
            return False
        capacity = {pool["name"]: pool["capacity_slots"] for pool in pools}
        return any(
            session["pid"] == pid
            and session["state"] == "attached"
            and session["registered_slots"] >= capacity.get(session["pool"], sys.maxsize) > 0
            for session in sessions
        )

    def kill(self) -> None:
        """Kill the service with SIGKILL, so that it cannot save anything at the last moment."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status. Kills a process that does not exit."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """End all processes of the service, whatever has happened."""
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def left_behind(self) -> list[int]:
        """Return the service's processes that are left after they have had time to end by themselves."""
        with suppress(DemoError):
            wait_until(lambda: not self.processes(), "the end of all processes")
        return self.processes()

    def processes(self) -> list[int]:
        """Return the processes on this machine whose command line names the folder of this demo's service."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.state).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # the process has ended meanwhile
        return found


class Engine:
    """An engine with its ranks, in processes of their own. It starts its first request when it has registered all
    memory of its pool. When it dies, it is started again. A thread of this process runs it."""

    def __init__(self, service: Service, spec: EngineSpec, *, endless: bool = False) -> None:
        """`endless`: whether the engine replays the trace again and again until `stop`. Then the replay must have a
        rate."""
        if endless:
            assert spec.options.rate is not None
            laps = 1 + int(_FOREVER_SECONDS * spec.options.rate / len(spec.requests))
            spec = replace(spec, requests=[*spec.requests] * laps)
        self._service, self._spec = service, spec
        self._log = service.state.parent / "engines.log"
        self._stop = threading.Event()
        self.finished = 0
        """How many requests all processes of the engine have finished."""
        self._begun: list[int] = []
        """How many requests were finished when each process of the engine began."""
        self.pid = 0
        """The pid of the engine's last process."""
        executor = ThreadPoolExecutor(1, f"demo-{spec.name}")
        self._result = executor.submit(self._run)
        executor.shutdown(wait=False)

    def wait_for(self, requests: int, life: int = 1) -> None:
        """Wait until the `life`th process of the engine has finished this many requests. Raises `DemoError`
        if the engine ends before."""
        wait_until(lambda: self._has_finished(requests, life), f"{self._spec.name} finishes {requests} requests")

    def wait_until_attached(self) -> None:
        wait_until(lambda: self._service.has_registered(self.pid), f"{self._spec.name} attaches")

    def _has_finished(self, requests: int, life: int) -> bool:
        if self._result.done():
            self.result()
            raise DemoError(f"{self._spec.name} has ended too early:\n{self._log.read_text()}")
        return len(self._begun) >= life and self.finished >= self._begun[life - 1] + requests

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Let the engine start no further request."""
        self._stop.set()

    def result(self) -> AttachedResult:
        """Wait for the end, and return the result of the replay. Raises `DemoError` if it has failed."""
        try:
            return self._result.result(DEADLINE_SECONDS)
        except (KvstowError, OSError) as error:  # a TimeoutError is an OSError
            raise DemoError(f"{self._spec.name} has no result ({error!r}):\n{self._log.read_text()}") from error

    def close(self) -> None:
        self.stop()
        wait([self._result], DEADLINE_SECONDS)

    def _run(self) -> AttachedResult:
        def count(finished: int) -> None:
            self.finished = finished

        launcher = EngineLauncher([self._spec], on_request=count, may_begin=self._may_begin, children_log=self._log)
        return launcher.run(self._stop)

    def _may_begin(self, pid: int) -> bool:
        if not self._service.has_registered(pid):
            return False
        self.pid = pid
        self._begun.append(self.finished)
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
