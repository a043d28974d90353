import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from kvstow_service.cli import app
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
