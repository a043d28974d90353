"""`kvstow trace`: traces that are generated, and those of a live pool."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.service.cli.conftest import Host, Run

from kvstow_api.client import Client
from kvstow_service.cli import app
from kvstow_service.cli.failures import ExitCode
from kvstow_service.replay.trace import TraceShape, generate_trace, parse_trace, read_trace


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", "generate", *arguments])


def test_standard_output_holds_the_trace() -> None:
    outcome = invoke("--sessions", "3", "--turns", "2", "--shared-prompts", "1", "--seed", "5")
    assert outcome.exit_code == 0
    shape = TraceShape(sessions=3, turns=2, shared_prompts=1, seed=5)
    assert list(parse_trace(outcome.stdout_bytes.splitlines(), "out")) == generate_trace(shape)


def test_a_file_holds_the_first_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    outcome = invoke("--requests", "9", "--output", str(path))
    assert (outcome.exit_code, outcome.stdout) == (0, "")
    assert read_trace(str(path)) == generate_trace(TraceShape(), limit=9)


def test_an_invalid_shape_is_exit_code_2() -> None:
    outcome = invoke("--turns", "0")
    assert outcome.exit_code == 2
    assert "turns is 0; allowed" in outcome.stderr


def test_a_closed_pipe_is_no_error(child_environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kvstow_service", "trace", "generate", "--sessions", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environ) as generating:
        assert generating.stdout is not None
        assert generating.stderr is not None
        assert generating.stdout.readline()
        generating.stdout.close()
        assert generating.stderr.read() == b""


def test_an_unwritable_file_is_exit_code_2(tmp_path: Path) -> None:
    outcome = invoke("--output", str(tmp_path / "none" / "trace.jsonl"))
    assert outcome.exit_code == 2
    assert "a writable file, or - (No such file or directory)" in outcome.stderr


# -- of a live pool ----------------------------------------------------------------------------------------------------


def keys(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number])).digest() for number in numbers]


class Traffic:
    """Uses the pool as soon as it is recorded, until it is not."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        engine, deadline = self._host.engine, time.monotonic() + 60.0
        while engine.pool.recording is None and time.monotonic() < deadline:
            time.sleep(0.001)
        number = 0
        while engine.pool.recording is not None and time.monotonic() < deadline:
            engine.use(keys(number % 7, 100, 101), looked_up=(0, 2))
            number += 1
            time.sleep(0.001)


def test_a_recording_is_a_trace_that_replays_read(host: Host, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    with Traffic(host):
        told = run("trace", "record", "--server", host.url, "--size", "2000B", "--output", str(path))
    assert told.exit_code == 0, told.stderr
    assert "the recording has ended: it has reached its size" in told.stderr
    found = read_trace(str(path))
    assert len(found) > 5
    assert {request.looked_up for request in found} == {(0, 2)}
    assert path.stat().st_size <= 2000
    table = run("replay", str(path), "--no-data", "--sizes", "4,64", "--json")
    assert table.exit_code == 0, table.stderr
    sizes = json.loads(table.stdout)["sizes"]
    assert [size["slots"] for size in sizes] == [4, 64]


def test_a_recording_that_breaks_off_keeps_what_came(
    host: Host, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 1, "output_length": 0, "hash_ids": [1], "looked_up": [0, 1]})
    monkeypatch.setattr(Client, "record", lambda *_, **limits: (one for one in ["", line]))
    told = run("trace", "record", "--server", host.url, "--output", str(tmp_path / "trace"))
    assert told.exit_code == ExitCode.ERROR
    assert "the connection has ended before the recording: 1 request of pool host" in told.stderr
    assert (tmp_path / "trace").read_text() == f"{line}\n"


def test_ctrl_c_ends_a_recording(host: Host, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[str]:
        yield '{"timestamp":0}'
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "record", lambda *_, **limits: interrupted())
    told = run("trace", "record", "--server", host.url)
    assert (told.exit_code, told.stdout) == (0, '{"timestamp":0}\n')
    assert "the recording has ended: it was stopped; 1 request" in told.stderr


def test_a_second_recording_is_refused(host: Host, run: Run) -> None:
    with host.engine.record(seconds=60.0, max_bytes=1000):
        told = run("trace", "record", "--server", host.url)
    assert told.exit_code == ExitCode.CONFLICT
    assert "is being recorded already" in told.stderr
