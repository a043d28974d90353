"""The command line of `kvstow serve`, up to where it would start: nothing here binds for longer than a refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstow.memory.limits import HugePageLimits
from kvstow_service.cli import app
from kvstow_service.settings import Settings, flag_name
from kvstow_service.sockets import AdminSockets, TcpAddress

pytestmark = pytest.mark.usefixtures("process_state")

SMALL = ["--pool-size", "1MiB", "--slot-size", "64KiB", "--port", "0"]


def serve(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


def test_every_setting_is_a_flag_with_its_default_in_the_help() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert [key for key in Settings.model_fields if flag_name(key) not in result.output] == []
    assert "per rank. Default: 8GiB." in " ".join(result.output.split())


def test_the_command_line_starts_without_torch_and_fastapi(child_environ: dict[str, str]) -> None:
    heavy = {"torch", "fastapi", "uvicorn", "httpx"}
    code = f"import sys, kvstow_service.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=child_environ, check=False
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_wrong_settings_are_one_line_each_and_exit_2() -> None:
    result = serve("--ranks", "none", "--pool-size", "8GX")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "kvstow serve: --ranks is 'none'; allowed: a whole number, 1 or more",
        "kvstow serve: --pool-size is '8GX'; allowed: a number of bytes, or a number with one of KiB MiB GiB TiB"
        " (powers of 1024) or kB MB GB TB",
    ]


def test_a_public_bind_without_a_token_is_refused() -> None:
    result = serve(*SMALL, "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert result.stderr == (
        "kvstow serve: --host 0.0.0.0 is reachable from other machines: set --token-file or --tls-client-ca\n"
    )


@pytest.mark.parametrize("content", [None, "", "two tokens"])
def test_a_token_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    result = serve(*SMALL, "--token-file", str(path))
    assert result.exit_code == 2
    assert str(path) in result.stderr


def test_a_taken_port_is_named_and_exits_1() -> None:
    taken = AdminSockets(TcpAddress.resolve("127.0.0.1", 0), None)
    result = serve(*SMALL[:-1], str(taken.port))
    taken.close()
    assert result.exit_code == 1
    assert result.stderr == f"kvstow serve: cannot listen on 127.0.0.1:{taken.port}: Address already in use\n"


def test_a_unix_socket_that_is_taken_exits_1_and_leaves_the_port(tmp_path: Path) -> None:
    uds = tmp_path / "admin.sock"
    taken = AdminSockets(uds=uds)
    result = serve(*SMALL, "--uds", str(uds))
    taken.close()
    assert result.exit_code == 1
    assert result.stderr == f"kvstow serve: cannot listen on unix:{uds}: another process is listening there\n"


def test_pools_larger_than_the_machine_are_refused_together() -> None:
    """Each of these pools would fit; all of them do not."""
    result = serve("--port", "0", "--ranks", "4096", "--pool-size", "1GiB")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvstow serve: 4096 x 1 GiB of pool cannot fit: ")


@pytest.mark.skipif(not HugePageLimits().pages.exists(), reason="this kernel has no 2 MiB pages")
def test_a_pool_without_reserved_pages_is_refused_with_what_there_is_and_what_reserves_more() -> None:
    result = serve("--port", "0", "--ranks", "2", "--pool-size", "1024TiB", "--huge-pages", "reserved")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "kvstow serve: 2 x 1024 TiB of pool cannot fit: 2048 TiB are needed in reserved 2 MiB pages (huge_pages is "
        "reserved), but the "
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("nonsense", "trace.jsonl:1: "),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}',
            "--kv-blocks is 1; allowed: 2 or more",
        ),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(tmp_path: Path, line: str, error: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line + "\n")
    result = serve(*SMALL, "--replay", str(trace), "--kv-blocks", "1")
    assert result.exit_code == 2
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
