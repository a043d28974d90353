"""A real `kvstow serve`, and engines in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.service.node import isolatedengine
from tests.waiting import eventually


class RealService:
    """`kvstow serve`, and engines that attach to it; all end with `running`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running = ExitStack()
        self.socket = folder / "node" / "attach.sock"
        python_path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
        self._environment = {"PYTHONPATH": os.pathsep.join(python_path), "PATH": os.environ["PATH"]}

    def serve(
        self,
        *options: str,
        prefix: tuple[str, ...] = (),
        cgroup: Path | None = None,
        module: str = "kvstow_service",
    ) -> httpx.Client:
        """A client of its admin API, once engines can attach. `cgroup`: the folder of the one that it belongs to."""
        uds = self._folder / "admin.sock"
        command = [*prefix, sys.executable, "-m", module, "serve", "--attach-socket", str(self.socket)]
        command += ["--port", "0", "--admin-socket", str(uds), "--shutdown-delay", "0s", *options]
        if cgroup is not None:
            join = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        self.process = self._start(command, stdout=None)
        client = self.running.enter_context(
            httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://k")
        )

        eventually(lambda: listens(uds) and is_open_to_the_group(self.socket))
        assert client.get("/livez").status_code == 200
        return client

    def engine(self, *options: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """The engine and what it has seen."""
        process = self.engine_later(*options)
        return process, self.seen_by(process)

    def engine_later(self, *options: object) -> subprocess.Popen[str]:
        """An engine that may have to wait: see `seen_by`."""
        command = [sys.executable, isolatedengine.__file__, str(self.socket), *map(str, options)]
        return self._start(command, stdout=subprocess.PIPE)

    def seen_by(self, engine: subprocess.Popen[str]) -> dict[str, Any]:
        assert engine.stdout is not None
        found: dict[str, Any] = json.loads(engine.stdout.readline())
        return found

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
