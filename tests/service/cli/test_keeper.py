"""`kvstow keeper`: its flags. For what it does see tests/service/node/survival and tests/service/node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstow_service.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--state=s", "--keep-timeout=soon"], "--keep-timeout is 'soon'; allowed: 0 or more seconds"),
        (["--state=s", "--keep-timeout=0"], "--keep-timeout is '0'; allowed: more than 0 seconds"),
        ([], "Missing option '--state'"),
    ],
)
def test_bad_flags_are_exit_code_2(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(app, ["keeper", *arguments])
    assert outcome.exit_code == 2
    assert words in outcome.stderr


def test_it_becomes_the_keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By exec: the process of the command line is four times as large."""
    called: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: called.append(given))
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["keeper", "--state=s", "--keep-timeout=2min"]).exit_code == 0
    ((program, command, _environ),) = called
    assert program == command[0]
    assert command[-3:] == [str(tmp_path / "s"), "120.0", "--stay"]
