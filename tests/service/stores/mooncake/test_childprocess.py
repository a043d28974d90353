"""A child process that runs something else than Mooncake."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvstow_service.stores.mooncake import childchannel
from kvstow_service.stores.mooncake.childchannel import ChildProcess

SECONDS = 30.0
LEAVES_ANOTHER = """
import os, subprocess, sys
subprocess.Popen(["cat"], stdin=int(sys.argv[1]))  # until the lane is closed; it has inherited the pipe of the log
os._exit(3)
"""


def test_whoever_else_has_the_pipe_of_the_log_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_another.py").write_text(LEAVES_ANOTHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(childchannel, "_MODULE", "leaves_another")
    child = ChildProcess(("control",))
    with ThreadPoolExecutor() as threads:
        try:
            eventually(child.has_ended)
            assert threads.submit(child.describe_end).result(SECONDS) == "exit status 3"
            threads.submit(child.close).result(SECONDS)
        finally:
            child.lanes["control"].end.close()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "kvstow-mooncake-log"])


def test_a_process_that_was_killed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even as one that nobody has waited for: the kernel may still be taking its memory apart."""
    (tmp_path / "stays.py").write_text("import sys; sys.stdin.read(); import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(childchannel, "_MODULE", "stays")
    child = ChildProcess(("control",))
    try:
        child.kill()
        assert not Path(f"/proc/{child.pid}").exists()
    finally:
        monkeypatch.undo()
        child.close()


def test_slots_that_are_free_before_the_process_is_gone_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess.Popen, "wait", lambda self, timeout=None: 0)
    with pytest.raises(AssertionError):
        test_a_process_that_was_killed_is_gone(tmp_path, monkeypatch)
