"""A child process that works for this one, with none of this process's sockets."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

_LAST_LINES = 3
_LAST_LINES_SECONDS = 1.0  # if another process has inherited the pipe, it stays open
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0


class IsolatedProcess:
    """A child process, which starts at once. Any thread may call `kill`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[int],
        inherited: Sequence[int],
        settings: Mapping[str, str],
        log: logging.Logger,
    ) -> None:
        """Run `module`. Its `arguments` are descriptors, which it inherits, like the `inherited` ones. The caller keeps
        all of them. `settings`: environment variables for it, unless they are set already. `log` gets the lines that it
        writes. Raises `OSError` if it cannot be started."""
        path = os.pathsep.join(entry for entry in sys.path if entry)  # same imports as here
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            pass_fds=[*arguments, *inherited],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**settings, **os.environ, "PYTHONPATH": path},
        )
        self.pid = self._process.pid
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read_lines, args=(self._process.stdout,), name="kvstow-child-log", daemon=True
        )
        self._reader.start()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the process. Returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def send_kill(self) -> None:
        """End the process as soon as the kernel allows it, which may be later if one of its threads waits for a
        disk."""
        self._process.kill()

    def leave_behind(self) -> None:
        """Let a background thread wait for the end of the process, which was killed."""
        threading.Thread(target=self._process.wait, name="kvstow-left-behind", daemon=True).start()

    def kill(self) -> None:
        """End the process, and wait until the kernel has taken its memory apart. After this, neither the process nor
        its network card reads or writes memory that it had mapped. Idempotent."""
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Return how the process has ended. Call it only after `kill`, or once `has_ended`."""
        status = self._process.returncode
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def describe_lines(self) -> str:
        """Return the last lines that an ended process has written, after a colon, or nothing."""
        self.join_reader()
        return f": {'; '.join(self._last_lines)}" if self._last_lines else ""

    def join_reader(self) -> None:
        """Wait until all lines of an ended process have been read."""
        self._reader.join(_LAST_LINES_SECONDS)

    def _read_lines(self, stream: IO[bytes]) -> None:
        """Read the lines of the process. They are logged for debugging only, because the lines that a library writes
        for each failure are no news for operators."""
        with suppress(ValueError), stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self._last_lines.append(text)
                self._log.debug("process %d: %s", self.pid, text)


def pause_after(starts: int) -> float:
    """Return how many seconds to wait before the next start, after `starts` starts without a call that has
    succeeded."""
    return 0.0 if starts <= 1 else min(_FIRST_PAUSE * 2 ** min(starts - 2, 16), _LONGEST_PAUSE)
