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
from tests.doubles.rank import use_keys
from tests.service.cli.conftest import Host, Run
from tests.service.replay.sessions import agents, session, turn, write

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


@pytest.mark.parametrize(
    ("path", "problem"), [("none/trace.jsonl", "No such file or directory"), ("/dev/full", "No space left on device")]
)
def test_a_file_that_cannot_be_written_is_exit_code_2(tmp_path: Path, path: str, problem: str) -> None:
    outcome = invoke("--output", str(tmp_path / path))
    assert outcome.exit_code == 2
    assert f"a writable file, or - ({problem})" in outcome.stderr


# -- traces of others --------------------------------------------------------------------------------------------------


def import_(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["trace", "import", *map(str, arguments)])


def test_sessions_become_a_trace_that_replays_read(tmp_path: Path) -> None:
    folder, trace = agents(tmp_path / "sessions", 5), tmp_path / "trace.jsonl.gz"
    write(folder / "other.json", session(turn(0.0, 600), turn(1.0, 600, model="b")))
    outcome = import_(folder, "--share-system", "--spread", "10m", "--output", trace)
    assert (outcome.exit_code, outcome.stdout) == (0, ""), outcome.stderr
    found = read_trace(str(trace))
    assert outcome.stderr.splitlines() == [
        f"imported {len(found)} requests of 6 sessions; left out 1 request to another model than their session's first"
    ]
    table = CliRunner().invoke(app, ["replay", str(trace), "--sizes", "400", "--json"])
    assert json.loads(table.stdout)["requests"] == len(found)


def test_what_is_skipped_is_named_and_counted(tmp_path: Path) -> None:
    bad = [turn(-1.0, 600) for _ in range(25)]
    write(tmp_path / "a.json", session(turn(0.0, 600), *bad))
    (tmp_path / "b.json").write_text("{")
    outcome = import_(tmp_path)
    assert outcome.exit_code == 0
    assert len(list(parse_trace(outcome.stdout_bytes.splitlines(), "out"))) == 1
    *named, last = outcome.stderr.splitlines()
    assert len(named) == 20
    assert all("skipped: " in line for line in named)
    told = "imported 1 request of 1 session; skipped 1 file, 25 requests, of which the first 20 are named above"
    assert last == told


def test_mooncakes_form_is_imported_from_standard_input() -> None:
    line = '{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}\n'
    outcome = CliRunner().invoke(app, ["trace", "import", "-"], input=line)
    assert (outcome.exit_code, outcome.stderr) == (0, "imported 1 request\n")
    expected = '{"timestamp":27,"input_length":700,"output_length":5,"runs":[4,2]}\n'
    assert outcome.stdout == expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.json",), "there are no requests to import"),
        (("empty",), "FILE is 'empty'; allowed: a folder with files whose names end with .json"),
        (("empty", "--spread", "1000000h"), "spread is 3600000000.0; allowed: 0 to 1e+09 seconds"),
    ],
)
def test_what_cannot_be_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    outcome = import_(*arguments, "--output", "trace.jsonl")
    assert outcome.exit_code == ExitCode.USAGE
    assert complaint in outcome.stderr
    assert not Path("trace.jsonl").exists()


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
        while engine.pool.requests.recording is None and time.monotonic() < deadline:
            time.sleep(0.001)
        number = 0
        while engine.pool.requests.recording is not None and time.monotonic() < deadline:
            use_keys(engine, keys(number % 7, 100, 101), looked_up=(0, 2))
            number += 1
            time.sleep(0.001)


def test_a_recording_is_a_trace_that_replays_read(host: Host, kvstow: Run, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    with Traffic(host):
        told = kvstow("trace", "record", "--size", "2000B", "--output", str(path))
    assert told.exit_code == 0, told.stderr
    assert "the recording has ended: it has reached its size" in told.stderr
    found = read_trace(str(path))
    assert len(found) > 5
    assert {request.looked_up for request in found} == {(0, 2)}
    assert {one for request in found for one in request.hash_ids} == set(range(7 + 2)), "numbered by their first use"
    assert path.stat().st_size <= 2000
    table = kvstow("replay", str(path), "--sizes", "4,64", "--json")
    assert table.exit_code == 0, table.stderr
    sizes = json.loads(table.stdout)["sizes"]
    assert [size["slots"] for size in sizes] == [4, 64]


def test_a_recording_that_breaks_off_keeps_what_came(
    kvstow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 1, "output_length": 0, "hash_ids": [1], "looked_up": [0, 1]})
    monkeypatch.setattr(Client, "record", lambda *_, **limits: (one for one in ["", line]))
    told = kvstow("trace", "record", "--output", str(tmp_path / "trace"))
    assert told.exit_code == ExitCode.ERROR
    assert "the connection has ended before the recording: 1 request of pool host" in told.stderr
    kept = '{"timestamp":0,"input_length":1,"output_length":0,"looked_up":[0,1],"runs":[0,1]}'
    assert (tmp_path / "trace").read_text() == f"{kept}\n"


def test_ctrl_c_ends_a_recording(kvstow: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[str]:
        yield '{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[77,5]}'
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "record", lambda *_, **limits: interrupted())
    told = kvstow("trace", "record")
    assert (told.exit_code, told.stdout) == (0, '{"timestamp":0,"input_length":1,"output_length":0,"runs":[0,2]}\n')
    assert "the recording has ended: it was stopped; 1 request" in told.stderr


def test_a_second_recording_is_refused(host: Host, kvstow: Run) -> None:
    with host.engine.record(seconds=60.0, max_bytes=1000):
        told = kvstow("trace", "record")
    assert told.exit_code == ExitCode.CONFLICT
    assert "is being recorded already" in told.stderr
