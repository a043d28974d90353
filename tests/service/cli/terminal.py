"""A process on a pseudo-terminal, and its output."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from typing import Self

_PATIENCE = 60.0
_SHOWN = 3000  # characters in a failure

# The terminal becomes the one that Ctrl-C and changes of its size come from. A shell starts background jobs with Ctrl-C
# ignored, and a child inherits that.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`kvstow` with these arguments on a pseudo-terminal. Leaving it ends the process."""

    def __init__(self, *arguments: str, environ: Mapping[str, str], rows: int = 40, columns: int = 110) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        command = [sys.executable, "-c", _TAKE_TERMINAL, "-m", "kvstow_service", *arguments]
        given = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}  # as xdist sets
        given["TERM"] = "xterm-256color"
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=given, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, words: str) -> str:
        """Wait for `words`; returns the output between the end of the last call and them."""
        deadline = time.monotonic() + _PATIENCE
        while words not in self.text:
            assert self._read(deadline), f"{words!r} did not come; there is: {self.text[-_SHOWN:]}"
        before, _, self.text = self.text.partition(words)
        return before

    def end(self) -> int:
        """Wait for the process to end; returns its exit status."""
        deadline = time.monotonic() + _PATIENCE
        while self._read(deadline):
            pass
        return self._process.wait(_PATIENCE)

    def _read(self, deadline: float) -> bool:
        """Read what is there. False at the end of the process's output."""
        left = deadline - time.monotonic()
        assert left > 0, f"nothing more comes; there is: {self.text[-_SHOWN:]}"
        ready, _, _ = select.select([self._master], [], [], left)
        try:
            got = os.read(self._master, 65536) if ready else b""
        except OSError:  # Linux: the other side is closed
            return False
        self.text += got.decode(errors="replace")
        return bool(got) or not ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
