"""Processes that a replay starts: each runs a module of this package and talks to its parent over a pipe.

A child gets what it needs as its first message. It ends when its parent does, because the pipe ends then. A terminal's
Ctrl-C reaches the first process alone, which tells the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

_LAST_WORDS_SECONDS = 10.0


class Child:
    """A child process, which this object owns. One thread uses it; `pipe` carries pickled messages both ways."""

    def __init__(self, module: str, message: object, log: IO[bytes] | None = None) -> None:
        """Run `module` as a program; `message` is its first. It writes to `log`, or to the standard error of this
        process."""
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, also from a bare checkout
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
            )
        self.pipe: Connection[Any, Any] = Connection(ours.detach())
        self.send(message)

    def send(self, message: object) -> None:
        """A child that has ended hears nothing; that it has ended shows where its messages are received."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> list[Any]:
        """The messages that are there. Raises `EOFError` once the child has ended and all are taken."""
        found = []
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, ConnectionError):
            if not found:
                raise EOFError(f"process {self.process.pid} has ended") from None
        return found

    def describe_end(self) -> str:
        """How the process has ended, after `receive` has raised: "exit status 1", "signal SIGKILL"."""
        status = self.join()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def join(self, seconds: float = _LAST_WORDS_SECONDS) -> int:
        """Close the pipe, which ends the child, and return its exit status; kills one that does not end in time."""
        self.pipe.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def parent_pipe() -> Connection[Any, Any]:
    """In a child: the pipe to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Connection(int(sys.argv[1]))
