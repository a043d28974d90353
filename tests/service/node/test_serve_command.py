"""The command line of `kvstow serve`, up to where it would start: nothing here binds for longer than a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.cli import app
from kvstow_service.node.settings import Settings, flag_name

pytestmark = pytest.mark.usefixtures("process_state")

SMALL = ["--memory", "2MiB", "--port", "0"]


def serve(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


def test_every_setting_is_a_flag_with_its_default_in_the_help() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert [key for key in Settings.model_fields if flag_name(key) not in result.output] == []
    assert "a multiple of 2 MiB. Default: 1GiB." in " ".join(result.output.split())
    assert "PydanticUndefined" not in result.output


def test_wrong_settings_are_one_line_each_and_exit_2() -> None:
    result = serve("--port", "none", "--memory", "8GX")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "kvstow serve: --memory is '8GX'; allowed: a number of bytes, or a number with one of KiB MiB GiB TiB"
        " (powers of 1024) or kB MB GB TB, with or without the B",
        "kvstow serve: --port is 'none'; allowed: 0 (any free port) to 65535",
    ]


def test_an_unknown_group_is_refused() -> None:
    result = serve(*SMALL, "--attach-group", "no such group")
    assert result.exit_code == 2
    assert result.stderr == (
        "kvstow serve: --attach-group is 'no such group'; allowed: the name or the number of a group of this machine\n"
    )


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
    taken = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
    result = serve(*SMALL[:-1], str(taken.port))
    taken.close()
    assert result.exit_code == 1
    assert result.stderr == f"kvstow serve: cannot listen on 127.0.0.1:{taken.port}: Address already in use\n"


@pytest.mark.parametrize("folder", ["", "admin"])
def test_an_admin_socket_where_engines_come_is_refused(tmp_path: Path, folder: str) -> None:
    admin = tmp_path / "run" / folder / "admin.sock"
    result = serve(*SMALL, f"--attach-socket={tmp_path}/run/attach.sock", f"--admin-socket={admin}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"kvstow serve: --admin-socket {admin} is in {tmp_path}/run, the folder of the attach socket, which engines "
        "may enter\n"
    )


def test_memory_that_the_machine_does_not_have_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    result = serve("--memory", "1024TiB", "--port", "0", "--attach-socket", str(path), "--state", str(tmp_path / "s"))
    assert result.exit_code == 1
    assert result.stderr.startswith("kvstow serve: --memory 1024 TiB cannot fit: 1024 TiB are needed beside a reserve ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("memory:", "--tier is 'memory:'; allowed: mooncake://MASTER:PORT"),
        ("mooncake://master:1", "a tier in Mooncake needs mooncake, which is not installed: pip install "),
    ],
)
def test_a_tier_that_cannot_be_used_is_refused_before_anything_starts(
    url: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow_service.stores.mooncake.mooncakestore.find_spec", lambda package: None)
    result = serve(*SMALL, "--attach-socket", str(tmp_path / "node" / "a.sock"), "--tier", url)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"kvstow serve: {complaint}")
    assert list(tmp_path.iterdir()) == []
