"""The example of the page on embedding, in a process of its own, at a real node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.node.conftest import MakeWholeNode

EXAMPLE = Path(__file__).parents[3] / "examples" / "attach.py"


def test_the_example_stores_and_loads(make_whole_node: MakeWholeNode, child_environ: dict[str, str]) -> None:
    node = make_whole_node(extents=4)
    node.start()
    command = [sys.executable, str(EXAMPLE), f"unix:{node.settings.attach_path}"]
    run = subprocess.run(command, env=child_environ, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("load of 32 blocks: done\nbytes: equal\n")
