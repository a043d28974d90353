"""The child processes of an attached replay: its engines and their ranks.

A child runs a function of this package with its parameters and a pipe to its parent. When the parent ends, the pipe
ends, and so does the child. A terminal's Ctrl-C ends only the first process, which ends the others.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from kvstow.errors import KvstowError, ProcessEndedError

logger = logging.getLogger("kvstow.replay")

Pipe: TypeAlias = "Connection[Any, Any]"

_SPAWN = get_context("spawn")
_LAST_WORDS_SECONDS = 10.0
"""How long a child may take to end before it is killed."""


class Named(Protocol):
    @property
    def name(self) -> str:
        """The name that begins each line that the process logs."""


_Spec = TypeVar("_Spec", bound=Named)


class Child:
    """A child process, which this object owns. One thread uses it. `pipe` carries pickled objects in both
    directions."""

    def __init__(self, main: Callable[[Pipe, _Spec], None], spec: _Spec, log: Path | None = None) -> None:
        """Run `main(pipe, spec)` in a new process. It appends its output to `log`, or writes to this process's standard
        error."""
        self.pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(main, theirs, spec, log))
        with theirs:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message. If the child has ended, it is dropped, and `receive` raises."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> list[Any]:
        """Return what the child has sent. Raises the child's `KvstowError` if it cannot do its work, and `EOFError` if
        it has ended and nothing is left to receive."""
        found = []
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, ConnectionError):
            if not found:
                raise EOFError(f"process {self.pid} has ended") from None
        if found and isinstance(found[-1], KvstowError):
            raise found[-1]
        return found

    def describe_end(self) -> str:
        """Say how the process has ended, after `receive` has raised: "exit status 1", "signal SIGKILL"."""
        status = self.join()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def join(self, seconds: float = _LAST_WORDS_SECONDS) -> int:
        """Close the pipe, which ends the child, and return its exit status. A child that does not end in time is
        killed."""
        self.pipe.close()
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(main: Callable[[Pipe, _Spec], None], pipe: Pipe, spec: _Spec, log: Path | None) -> None:
    """Run `main` in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format=f"{spec.name}: %(message)s", stream=sys.stderr)
    try:
        main(pipe, spec)
    except ProcessEndedError as error:  # a child of this process has died; the parent restarts this process, too
        logger.warning("%s", error)
        sys.exit(1)
    except KvstowError as error:
        with suppress(OSError):
            pipe.send(error)
        sys.exit(1)
