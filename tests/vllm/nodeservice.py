"""A node service in a process of its own, for engines to attach to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.vllm.engines import Engine, eventually

MIB = 1 << 20


class NodeService:
    """`kvstow serve` with its sockets in `folder`. It can be started, killed and started again."""

    def __init__(self, folder: Path, memory: str = "64MiB", *options: str, module: str = "kvstow_service") -> None:
        """`module`: what is run as `kvstow`."""
        self.socket, self._admin, self._folder = folder / "run" / "attach.sock", folder / "admin.sock", folder
        self._arguments = ["--memory", memory, "--extent-size", "16MiB", *options]
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def attach(self) -> str:
        """For `kv_connector_extra_config`."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [sys.executable, "-m", self._module, "serve", "--attach-socket", str(self.socket)]
        command += ["--admin-socket", str(self._admin), "--port", "0", *self._arguments]
        environ = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        eventually(lambda: self._answers(), "a node service that answers")

    def stop(self, number: int = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(30)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def get(self, path: str) -> Any:
        with self._client() as client:
            return client.get(path).raise_for_status().json()

    def _client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self._admin)), base_url="http://kvstow")

    def is_ready(self) -> bool:
        """What /readyz says."""
        with self._client() as client:
            return client.get("/readyz").status_code == 200

    def sessions(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/sessions")["items"])

    def detach(self, session: str) -> None:
        """As an operator does."""
        with self._client() as client:
            client.delete(f"/v1/sessions/{session}").raise_for_status()

    def bypass_stores(self, *, is_on: bool) -> None:
        """As an operator does, for all pools."""
        with self._client() as client:
            client.put("/v1/bypass", json={"load": False, "store": is_on}).raise_for_status()

    def pools(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/pools")["items"])

    def used_slots(self) -> int:
        """Cached blocks of all pools."""
        return sum(pool["slots"]["cached"] for pool in self.pools())

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            self.get("/v1/sessions")
        except httpx.TransportError:
            return False
        return True


@contextmanager
def running_service(folder: Path, memory: str = "64MiB", *options: str) -> Iterator[NodeService]:
    service = NodeService(folder, memory, *options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def until_attached(engine: Engine, service: NodeService) -> None:
    """Step an engine of this process until its ranks have memory."""

    def has_memory() -> bool:
        engine.step()
        return is_attached(service)

    eventually(has_memory, "an attached engine")


def is_attached(service: NodeService, sessions: int = 1) -> bool:
    """Whether so many engines are attached and have memory."""
    found = service.sessions()
    attached = [each for each in found if each["state"] == "attached" and each["registered_slots"] > 0]
    return len(attached) == sessions
