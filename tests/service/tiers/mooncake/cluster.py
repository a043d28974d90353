"""A Mooncake Store of this machine: a master, and a process that lends it memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from kvstow_service.tiers.mooncake.location import MooncakeLocation

LEASE_SECONDS = 0.5
WATERMARK = 0.85
"""Of the memory, above which the master evicts. Its allocator rounds sizes up, those of slots with headers by up to an
eighth, and counts them without that. So with its default of 0.9 the memory may be used up before it evicts."""
CLIENT_TTL_SECONDS = 3
"""After it, the master forgets the objects of a provider that has gone."""
_START_SECONDS = 60.0
_ATTEMPTS = 3

_PROVIDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 0, "tcp", "", sys.argv[2])
print(code, flush=True)
sys.stdin.read()
"""
_ports: Iterator[int] = count(50_051, 2)  # in the namespace of `make test-tier` nobody else has any


class Cluster:
    """Starts at once; `close` ends all of it."""

    def __init__(self, log: Path, segment_bytes: int = 1 << 30, *, watermark: float = WATERMARK) -> None:
        self._log = log.open("ab")
        self._port, self._segment_bytes = next(_ports), segment_bytes
        self._watermark = watermark
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            self.master = self.start_master()
            self.provider = self.start_provider()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._port}?host=127.0.0.1"

    @property
    def location(self) -> MooncakeLocation:
        return MooncakeLocation.parse(self.url)

    def start_master(self) -> subprocess.Popen[Any]:
        self.master = self._start(
            str(Path(sys.executable).with_name("mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self._port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._port + 1}",
            f"--default_kv_lease_ttl={int(1000 * LEASE_SECONDS)}",
            f"--client_ttl={CLIENT_TTL_SECONDS}",
            f"--eviction_high_watermark_ratio={self._watermark}",
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_listening():
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.01)
        return self.master

    def start_provider(self) -> subprocess.Popen[Any]:
        """Waits until its memory is in the store. Mooncake picks its ports at random, so an attempt may fail."""
        for _ in range(_ATTEMPTS):
            self.provider = self._start(
                sys.executable,
                "-c",
                _PROVIDER,
                str(self._segment_bytes),
                f"127.0.0.1:{self._port}",
                stdout=subprocess.PIPE,
            )
            assert self.provider.stdout is not None
            code = self.provider.stdout.readline()
            if code == b"0\n":
                return self.provider
            self.kill(self.provider)
        raise AssertionError(f"no provider could be started, the last one answered {code!r}: {self._log.name}")

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self, process: subprocess.Popen[Any]) -> None:
        process.kill()
        process.wait()

    def stop(self, process: subprocess.Popen[Any]) -> None:
        """Returns when all its threads have stopped."""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._log.close()

    def _start(self, *command: str, stdout: int | None = None) -> subprocess.Popen[Any]:
        stdout = self._log.fileno() if stdout is None else stdout
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=self._log)
        self._processes.append(process)
        return process
