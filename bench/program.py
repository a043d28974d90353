"""Programs of the benchmarks in their own processes. Each answers with one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(name: str, *arguments: str, through: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run the module `name` as a program, which the command `through` starts if there is one. Its input ends with the
    context, which ends the program. After an error it is killed."""
    process = subprocess.Popen(
        [*through, sys.executable, "-m", name, *arguments],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def answer_of(process: subprocess.Popen[str]) -> Any:
    """Return the program's next line. Raises `RuntimeError` if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has failed")
    return json.loads(line)
