"""A Mooncake Store of this machine: a master, and a process that lends it memory."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import pytest
from tests.waiting import eventually

from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation

LEASE_SECONDS = 0.5
WATERMARK = 0.85
"""Of the memory, above which the master evicts. Its allocator rounds sizes up, those of slots with headers by up to an
eighth, and counts them without that. So with its default of 0.9 the memory may be used up before it evicts."""
_CLIENT_TTL_SECONDS = 30
"""After it, the master forgets the objects of a provider that says nothing. On a busy machine a provider can be silent
for seconds."""
_START_SECONDS = 180.0
_ATTEMPTS = 3

_PROVIDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 0, "tcp", "", sys.argv[2])
print(code, flush=True)
sys.stdin.read()
"""
_ports: Iterator[int] = count(20_051, 2)
"""Nobody else listens in the namespace of `make test-tier`. They are below `ip_local_port_range`, from which the kernel
takes the ports of outgoing connections: one of these once kept a master from listening."""


def require_network() -> None:
    """Skip the test where Mooncake cannot run: it listens on all addresses, and its ports here are fixed."""
    if find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: make test-tier")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        pytest.skip("Mooncake needs the package libibverbs1")
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.skip("not in a network namespace of its own: make test-tier")


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
        self.master = self._start_master(self._port)
        eventually(
            lambda: is_listening(self._port) or self.master.poll() is not None, "a master", seconds=_START_SECONDS
        )
        assert self.master.poll() is None, f"the master has ended: {self._log.name}"
        return self.master

    def _start_master(self, port: int, *options: str) -> subprocess.Popen[Any]:
        return self._start(
            sys.executable,
            "-c",
            "from mooncake.cli import main; main()",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={port + 1}",
            f"--default_kv_lease_ttl={int(1000 * LEASE_SECONDS)}",
            f"--client_ttl={_CLIENT_TTL_SECONDS}",
            f"--eviction_high_watermark_ratio={self._watermark}",
            *options,
        )

    def start_provider(self) -> subprocess.Popen[Any]:
        """Waits until its memory is in the store. Mooncake picks its ports at random, so an attempt may fail."""
        for _ in range(_ATTEMPTS):
            self.provider = self._start(
                sys.executable,
                "-c",
                _PROVIDER,
                str(self._segment_bytes),
                self.location.master,
                stdout=subprocess.PIPE,
            )
            assert self.provider.stdout is not None
            code = self.provider.stdout.readline()
            if code == b"0\n":
                return self.provider
            self.kill(self.provider)
        raise AssertionError(f"no provider could be started, the last one answered {code!r}: {self._log.name}")

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


class ElectedCluster(Cluster):
    """Two masters, of which etcd names the one that leads; the other one follows its log."""

    def __init__(self, log: Path, etcd: str) -> None:
        self._etcd, self._data = etcd, TemporaryDirectory()
        self._etcd_port, self._masters = next(_ports), dict[int, subprocess.Popen[Any]]()
        super().__init__(log)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._etcd_port}?ha=etcd&host=127.0.0.1"

    def start_master(self) -> subprocess.Popen[Any]:
        """Starts etcd and both masters. Returns the one that leads."""
        client, peers = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._etcd_port + 1))
        self._start(
            self._etcd,
            f"--data-dir={self._data.name}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )
        eventually(lambda: is_listening(self._etcd_port), "etcd", seconds=_START_SECONDS)
        ha = ("--enable_ha=true", "--ha_backend_type=etcd", f"--ha_backend_connstring=127.0.0.1:{self._etcd_port}")
        for port in (self._port, next(_ports)):
            self._masters[port] = self._start_master(port, *ha, "--enable_oplog=true")
        eventually(lambda: self.leader is not None, "a master that leads", seconds=_START_SECONDS)
        leader = self.leader
        assert leader is not None
        self.master = leader
        return leader

    @property
    def leader(self) -> subprocess.Popen[Any] | None:
        """The master that serves clients: only the one that leads listens."""
        alive = {port: one for port, one in self._masters.items() if one.poll() is None}
        return next((one for port, one in alive.items() if is_listening(port)), None)

    def log(self) -> str:
        """What the next master will know. It is written a little after each put."""
        everything = base64.b64encode(b"\0").decode()
        question = json.dumps({"key": everything, "range_end": everything}).encode()
        with urlopen(f"http://127.0.0.1:{self._etcd_port}/v3/kv/range", question, timeout=_START_SECONDS) as answer:
            found = json.load(answer)["kvs"]
        return "".join(base64.b64decode(one["value"]).decode(errors="replace") for one in found)

    def close(self) -> None:
        super().close()
        self._data.cleanup()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
