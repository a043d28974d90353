"""A child process that runs something else than Mooncake."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvstow_service.stores.mooncake.childchannel import ChildProcess

SECONDS = 30.0
LEAVES_ANOTHER = """
import os, subprocess, sys
subprocess.Popen(["cat"], stdin=int(sys.argv[1]))  # until the lane is closed; it has inherited the pipe of the log
os._exit(3)
"""
STAYS = "import sys; sys.stdin.read(); import time; time.sleep(600)"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ChildProcess]:
    """Starts a child that runs this code, with the descriptors as arguments."""

    def run(code: str) -> ChildProcess:
        interpreter, program = tmp_path / "python", tmp_path / "program.py"
        program.write_text(code)
        interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {program} "$@"\n')  # in place of -m MODULE
        interpreter.chmod(0o700)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(interpreter))
            return ChildProcess(("control",))

    return run


def test_whoever_else_has_the_pipe_of_the_log_holds_up_nothing(start: Callable[[str], ChildProcess]) -> None:
    child = start(LEAVES_ANOTHER)
    with ThreadPoolExecutor() as threads:
        try:
            eventually(child.has_ended)
            assert threads.submit(child.describe_end).result(SECONDS) == "exit status 3"
            threads.submit(child.close).result(SECONDS)
        finally:
            child.lanes["control"].end.close()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "kvstow-mooncake-log"])


def test_a_process_that_was_killed_is_gone(start: Callable[[str], ChildProcess]) -> None:
    """Not even as one that nobody has waited for: the kernel may still be taking its memory apart."""
    child = start(STAYS)
    child.kill()
    assert not Path(f"/proc/{child.pid}").exists()
    child.close()
