"""A redis-server of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from itertools import count
from pathlib import Path

_ports = count(26_379)  # below the ports of outgoing connections


class Server:
    """Starts at once, without files of its own."""

    def __init__(self, folder: Path, *options: str, tls_folder: Path | None = None) -> None:
        self.port = next(_ports)
        self._log = (folder / "log").open("ab")
        ports = ["--port", str(self.port)]
        if tls_folder is not None:
            files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
            named = (text for name, file in files.items() for text in (f"--tls-{name}-file", str(tls_folder / file)))
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *named]
        self._command = ["redis-server", "--bind", "127.0.0.1", *ports, "--save", "", "--appendonly", "no", *options]
        self._folder = folder
        self.process = self._start()

    def start_again(self) -> None:
        """After `kill`: on the same port, without any key."""
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=self._folder, stdout=self._log, stderr=self._log)

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Returns when all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()
