"""Programs of the benchmarks in processes of their own, which answer with one line of JSON."""

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
    """The module `name` as a program, started by the command `through` if there is one. Its input ends with the
    context, and so does the program: it is killed after an error."""
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
    """Its next line. Raises `RuntimeError` if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has failed")
    return json.loads(line)
