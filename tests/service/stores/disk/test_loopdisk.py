"""The tests leave no mount behind, not even when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_PROGRAM = """
import sys, time
from pathlib import Path
from tests.service.stores.disk.loopdisk import LoopDisk, LoopDiskError
try:
    disk = LoopDisk(Path(sys.argv[1]), "ext4", 64 << 20)
except LoopDiskError:
    sys.exit(5)
if sys.argv[2] == "frozen":
    disk.freeze()
print(disk.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("state", ["usable", "frozen"])
def test_a_run_that_is_killed_leaves_no_mount(tmp_path: Path, state: str) -> None:
    if os.geteuid():
        pytest.skip("only root mounts file systems")
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), state]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as run:
        assert run.stdout is not None
        shown = run.stdout.readline().strip()
        if not shown:
            assert run.wait() == 5
            pytest.skip("no file system can be mounted")
        folder = Path(shown)
        assert folder.is_mount()
        assert tmp_path.parent not in folder.parents
        os.killpg(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline, "it is still mounted"
        time.sleep(0.01)
    assert str(folder) not in Path("/proc/mounts").read_text()
