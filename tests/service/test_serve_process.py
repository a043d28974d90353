"""`kvstow serve` as a process of its own: what only a process can show."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.process

# One 64 KiB chunk every half a second: 64 chunks are pinned in half a minute, longer than any of these tests.
SLOW_PINNING = ["--pool-size", "4MiB", "--slot-size", "64KiB", "--pin-chunk", "64KiB", "--pin-pause", "500ms"]

# Import it, and you wait until the gate is there; then it fails.
BROKEN_TORCH = """
import os, time
while not os.path.exists({gate!r}):
    time.sleep(0.01)
raise ImportError("no torch here")
"""


class Service:
    """A running `kvstow serve` and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, eventually: Any) -> None:
        self.process, self._log = process, log
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

    def pinned_bytes(self) -> list[int]:
        return [rank["pinned_bytes"] for rank in self.readiness()["ranks"]]

    def hit_blocks(self) -> int:
        return int(self.client.get("/v1/stats").json()["lookups"]["hit_blocks"])

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path, child_environ: dict[str, str], eventually: Any) -> Iterator[Start]:
    services: list[Service] = []

    def serve(*args: str, modules: Path | None = None) -> Service:
        environ = dict(child_environ)
        if modules is not None:
            environ["PYTHONPATH"] = f"{modules}:{environ['PYTHONPATH']}"
        log = tmp_path / f"log-{len(services)}"
        command = [sys.executable, "-m", "kvstow_service", "serve", *args]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=environ)
        try:
            services.append(Service(process, log, eventually))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return services[-1]

    yield serve
    for service in services:
        service.client.close()
        service.process.kill()
        service.process.wait()


def test_it_answers_before_torch_is_there_and_goes_on_without_it(start: Start, tmp_path: Path, eventually: Any) -> None:
    gate = tmp_path / "gate"
    broken = tmp_path / "modules" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(BROKEN_TORCH.format(gate=str(gate)))
    service = start("--port", "0", *SLOW_PINNING, "--shutdown-delay", "0", modules=broken.parent)
    assert [service.status(path) for path in ("/livez", "/readyz", "/startupz", "/health", "/healthz")] == [200] * 5
    readiness = service.readiness()
    assert (readiness["state"], readiness["usable_slots"]) == ("starting", 0)
    gate.touch()
    eventually(lambda: service.status("/readyz") == 503, "the broken rank in readiness")
    assert "rank 0 is failed (internal: no torch here)" in service.client.get("/readyz?verbose").text
    assert service.status("/livez") == 200
    assert "rank 0 cannot be built: no torch here" in service.log()
    assert service.end(signal.SIGINT) == 0


def test_it_serves_while_it_pins_and_stops_in_the_middle(start: Start, tmp_path: Path, eventually: Any) -> None:
    uds, token = tmp_path / "admin.sock", tmp_path / "token"
    token.write_text("open-sesame\n")
    files = ["--uds", str(uds), "--token-file", str(token)]
    service = start("--port", "0", "--ranks", "2", "--shutdown-delay", "2s", *SLOW_PINNING, *files)
    assert stat.S_IMODE(uds.stat().st_mode) == 0o600

    eventually(lambda: service.readiness()["usable_slots"], "a first usable slot")
    readiness = service.readiness()
    assert (readiness["state"], readiness["capacity_slots"]) == ("pinning", 64)
    assert 0 < readiness["usable_slots"] < 64
    assert {(rank["rank"], rank["state"], rank["target_bytes"]) for rank in readiness["ranks"]} == {
        (0, "pinning", 4 << 20),
        (1, "pinning", 4 << 20),
    }
    eventually(lambda: service.status("/readyz") == 200, "readiness")  # importing torch may have held up the loop
    assert "[-]pinned failed: " in service.client.get("/readyz?verbose").text
    before = readiness["usable_slots"]
    eventually(lambda: service.readiness()["usable_slots"] > before, "progress")

    metrics = service.client.get("/metrics").text
    assert f'torch="{version("torch")}"' in metrics
    assert "process_resident_memory_bytes" in metrics

    resize = {"capacity_slots": 1}
    assert service.client.patch("/v1/pools/host", json=resize).status_code == 401
    bearer = {"Authorization": "Bearer open-sesame"}
    assert service.client.patch("/v1/pools/host", json=resize, headers=bearer).status_code in (200, 202)
    eventually(lambda: service.pinned_bytes() == [64 << 10] * 2, "the smaller pools")
    assert service.readiness()["state"] == "ready"
    assert service.client.patch("/v1/pools/host", json={"capacity_slots": 64}, headers=bearer).status_code in (200, 202)
    eventually(lambda: min(service.pinned_bytes()) > 64 << 10, "the growing pools")

    service.process.send_signal(signal.SIGTERM)
    eventually(lambda: service.status("/readyz") == 503, "a failing readiness")
    assert service.status("/livez") == 200
    assert service.readiness()["state"] == "draining"
    assert service.process.wait(30) == 0
    assert not uds.exists()
    assert "Traceback" not in service.log()
    assert " ERROR " not in service.log()


def test_a_killed_service_restarts_at_once_and_a_second_signal_does_not_wait(
    start: Start, tmp_path: Path, eventually: Any
) -> None:
    uds = tmp_path / "admin.sock"
    common = ["--uds", str(uds), *SLOW_PINNING]
    first = start("--port", "0", *common)
    eventually(lambda: first.readiness()["usable_slots"], "a first usable slot")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert uds.exists()

    second = start("--port", str(first.port), *common, "--shutdown-delay", "10m")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as client:
        assert client.get("http://kvstow/livez").status_code == 200
    second.process.send_signal(signal.SIGTERM)
    eventually(lambda: second.status("/readyz") == 503, "a failing readiness")
    assert second.end(signal.SIGINT) == 130


def test_a_killed_replay_leaves_nothing_that_stops_the_next(start: Start, tmp_path: Path, eventually: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    trace.write_text("".join(json.dumps({**line, "hash_ids": [0, number + 1]}) + "\n" for number in range(5000)))
    common = ["--pool-size", "1MiB", "--slot-size", "64KiB", "--replay", str(trace), "--replay-rate", "100"]
    first = start("--port", "0", *common)
    eventually(first.hit_blocks, "hits")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL

    second = start("--port", str(first.port), *common, "--shutdown-delay", "0")
    eventually(second.hit_blocks, "hits after the restart")
    assert second.end(signal.SIGTERM) == 0
    assert "mismatches      0 blocks" in second.log()
