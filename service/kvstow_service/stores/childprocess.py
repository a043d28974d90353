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
    """Starts at once. `kill` may be called by any thread."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[int],
        inherited: Sequence[int],
        settings: Mapping[str, str],
        log: logging.Logger,
    ) -> None:
        """Runs `module` with descriptors as `arguments`, which it inherits, as it does those in `inherited`; all stay
        the caller's. `settings`: environment variables, unless they are set already. `log` gets what it writes.
        Raises `OSError`."""
        path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, also from a bare checkout
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
        """Whether it ends within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def send_kill(self) -> None:
        """End it as soon as the kernel lets it: a thread that waits for a disk keeps it until then."""
        self._process.kill()

    def leave_behind(self) -> None:
        """It was killed, and nobody waits for its end."""
        threading.Thread(target=self._process.wait, name="kvstow-left-behind", daemon=True).start()

    def kill(self) -> None:
        """End the process, and wait until the kernel has taken its memory apart: nothing that it mapped is read or
        written after this, nor are transfers of its network card. Idempotent."""
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """How the process has ended, and what it wrote last. Only after `kill`, or once `has_ended`."""
        self.join_reader()
        status = self._process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return "; ".join([how, *self._last_lines])

    def join_reader(self) -> None:
        """Wait until all that an ended process has written was read."""
        self._reader.join(_LAST_LINES_SECONDS)

    def _read_lines(self, stream: IO[bytes]) -> None:
        """What a library writes for each failure is no news for operators."""
        with suppress(ValueError), stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self._last_lines.append(text)
                self._log.debug("process %d: %s", self.pid, text)


def pause_after(starts: int) -> float:
    """Seconds before the next start, after so many without a call that succeeded."""
    return 0.0 if starts <= 1 else min(_FIRST_PAUSE * 2 ** min(starts - 2, 16), _LONGEST_PAUSE)
