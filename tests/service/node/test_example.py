"""The example of the page on embedding, in a process of its own, at a real node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvstow.memory.limits import MemoryLimits
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings

EXAMPLE = Path(__file__).parents[3] / "examples" / "attach.py"
MIB = 1 << 20


def test_the_example_stores_and_loads(tmp_path: Path, child_environ: dict[str, str]) -> None:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    path = tmp_path / "node" / "attach.sock"
    settings = Settings(memory=8 * MIB, attach_socket=path, extent_size=2 * MIB)
    node = Node(settings, limits=MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"))
    try:
        node.start()
        command = [sys.executable, str(EXAMPLE), f"unix:{path}"]
        run = subprocess.run(command, env=child_environ, capture_output=True, text=True, timeout=60, check=False)
    finally:
        node.close()
    assert (run.stdout, run.returncode) == ("store: done\nload: done\nbytes: equal\n", 0), run.stderr


def test_the_example_is_short() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line and not line.startswith(("#", '"""'))]
    assert len(lines) <= 60
