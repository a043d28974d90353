"""A child process that runs something else than Mooncake."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.service.conftest import Eventually

from kvstow_service.tiers.mooncake import childprocess
from kvstow_service.tiers.mooncake.childprocess import ChildProcess

SECONDS = 30.0
LEAVES_ANOTHER = """
import os, subprocess, sys
subprocess.Popen(["cat"], stdin=int(sys.argv[1]))  # until the lane is closed; it has inherited the pipe of the log
os._exit(3)
"""


def test_whoever_else_has_the_pipe_of_the_log_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    (tmp_path / "leaves_another.py").write_text(LEAVES_ANOTHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(childprocess, "_MODULE", "leaves_another")
    child = ChildProcess(("control",))
    with ThreadPoolExecutor() as threads:
        try:
            eventually(child.has_ended)
            assert threads.submit(child.describe_end).result(SECONDS) == "exit status 3"
            threads.submit(child.close).result(SECONDS)
        finally:
            child.lanes["control"].close()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "kvstow-mooncake-log"])
