"""Single key presses at a terminal, and changes of its size."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self


class Keyboard:
    """While it is open, keys are read without waiting for a line end and are not echoed. Ctrl-C still interrupts.

    Used on the main thread. Closing it restores the terminal.
    """

    def __enter__(self) -> Self:
        self._stdin = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._stdin)
        self._resized, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = wakeup
        self._old_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._old_handler: Any = signal.signal(signal.SIGWINCH, lambda *_: None)
        tty.setcbreak(self._stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGWINCH, self._old_handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._resized)
        os.close(self._wakeup)

    def wait(self, seconds: float) -> str | None:
        """The next key; None on timeout, empty if the size has changed, q if the terminal is gone."""
        ready, _, _ = select.select([self._stdin, self._resized], [], [], seconds)
        if self._resized in ready:
            os.read(self._resized, 1024)
            return ""
        if self._stdin not in ready:
            return None
        return os.read(self._stdin, 1).decode(errors="replace") or "q"
