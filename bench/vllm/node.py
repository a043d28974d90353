"""A node service in its own process, to which engines attach."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.vllm import admin

_PATIENCE = 120.0
_PR_SET_THP_DISABLE = 41


class Node(NamedTuple):
    """The addresses of a node service: its attach socket, and the port of its admin server."""

    socket: Path
    port: int


class NodeService:
    """`kvstow serve`. Its memory is one extent, so that the first engine is granted all of it. Otherwise an engine
    would get more only as it fills what it has. The service can be restarted after `kill`. With `keeps`, a keeper holds
    its memory and its index meanwhile."""

    def __init__(self, num_bytes: int, *, keeps: bool = False, small_pages: bool = False) -> None:
        """With `small_pages`, pages are 4 KiB, even if the machine offers larger ones."""
        num_bytes -= num_bytes % (2 << 20)
        self._num_bytes, self._small_pages = num_bytes, small_pages
        self._folder = Path(tempfile.mkdtemp(prefix="kvstow-node-"))
        self.node = Node(self._folder / "attach.sock", admin.free_port())
        size = str(num_bytes)
        self._arguments = ["--memory", size, "--extent-size", size, "--pin-pause", "0ms", "--shutdown-delay", "0ms"]
        if keeps:
            self._arguments += ["--state", str(self._folder / "state")]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NodeService:
        try:
            self.start()
            self.wait_until_populated()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end(signal.SIGTERM)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def start(self) -> None:
        """Start the service. Returns when its admin server answers."""
        command = [sys.executable, "-m", "kvstow_service", "serve", "--attach-socket", str(self.node.socket)]
        command += ["--port", str(self.node.port), *self._arguments]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=_do_without_huge_pages if self._small_pages else None
            )
        self._wait(self.answers, "answer")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def answers(self) -> bool:
        try:
            self.sessions()
        except OSError:
            return False
        return True

    def wait_until_populated(self) -> None:
        """Wait until all memory is populated. Raises `TimeoutError`."""

        def is_populated() -> bool:
            return bool(admin.ask(self.node.port, "/v1/readiness")["memory"]["populated_bytes"] >= self._num_bytes)

        self._wait(is_populated, "populate its memory")

    def sessions(self) -> list[dict[str, Any]]:
        return list(admin.ask(self.node.port, "/v1/sessions")["items"])

    def count_attached(self) -> int:
        """Return how many engines are attached and have memory."""
        try:
            sessions = self.sessions()
        except OSError:
            return 0
        return sum(one["state"] == "attached" and one["registered_slots"] > 0 for one in sessions)

    def pools(self) -> list[dict[str, Any]]:
        return list(admin.ask(self.node.port, "/v1/pools")["items"])

    def forget(self) -> None:
        """Remove all blocks, once the engines have ended."""
        self._wait(lambda: not self.sessions(), "note the end of all engines")
        for pool in self.pools():
            admin.purge(self.node.port, pool["name"])
        self._wait(lambda: not any(pool["slots"]["cached"] for pool in self.pools()), "purge its pools")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the node service has ended: {self.log[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the node service did not {what} within {_PATIENCE:g} s: {self.log[-2000:]}")
            time.sleep(0.02)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(30)


def device_processes() -> list[int]:
    """Return the processes that `nvidia-smi` lists, or none if there is no such program or it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    return [int(line) for line in listed.split() if line.isdecimal()]


def _do_without_huge_pages() -> None:
    """Switch off transparent huge pages for this process. `exec` keeps the setting."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
