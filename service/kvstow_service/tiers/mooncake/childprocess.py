"""A child process that runs Mooncake's library, seen from the process that started it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from kvstow.errors import TierUnavailableError
from kvstow_service.tiers.mooncake.childmessages import Connect, Done, Refused
from kvstow_service.tiers.mooncake.lane import Lane, make_lane

_MODULE = "kvstow_service.tiers.mooncake.storechild"
_LAST_LINES = 3
_LAST_LINES_SECONDS = 1.0  # if another process has inherited the pipe, it stays open

# What an operator has set stays.
_SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "8192",  # with its default of 1,024, batches have hung
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # of 4 s each: this side tries again
    "MC_RPC_TIMEOUT_MS": "5000",  # connecting to a master that hangs would take 30 s
    "GLOG_minloglevel": "2",  # errors
}

_log = logging.getLogger(__name__)


class ChildProcess:
    """Starts at once. Each lane is used by one thread at a time; `kill` may be called by any thread."""

    def __init__(self, lanes: Sequence[str], inherited: Sequence[int] = ()) -> None:
        """`lanes`: names; the first one connects and adds memory. `inherited`: descriptors that the process has until
        it ends; they stay the caller's. Raises `OSError`."""
        self.lanes: dict[str, Lane] = {}
        theirs = []
        for name in lanes:
            self.lanes[name], end = make_lane()
            theirs.append(end)
        path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, also from a bare checkout
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *(str(end.fileno()) for end in theirs)],
                pass_fds=[*(end.fileno() for end in theirs), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_SETTINGS | os.environ | {"PYTHONPATH": path},
            )
        except BaseException:
            self._close_lanes()
            raise
        finally:
            for end in theirs:
                end.close()
        self.pid = self._process.pid
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read_lines, args=(self._process.stdout,), name="kvstow-mooncake-log", daemon=True
        )
        self._reader.start()

    def connect(self, message: Connect, timeout: float) -> None:
        """Raises `TierUnavailableError`, `TimeoutError`, or `EOFError` if the process has ended."""
        answer = self.ask(next(iter(self.lanes)), message, timeout)
        if isinstance(answer, Refused):
            raise TierUnavailableError(answer.reason)

    def ask(self, lane: str, request: object, timeout: float, *, fds: Sequence[int] = ()) -> Done | Refused:
        """The answer. Raises `TimeoutError`, after which nothing more may be asked on this lane, or `EOFError` if the
        process has ended."""
        end = time.monotonic() + timeout
        found = self.lanes[lane]
        found.send(request, fds=fds, timeout=timeout)
        answer, _ = found.receive(max(0.001, end - time.monotonic()))
        assert isinstance(answer, Done | Refused)
        return answer

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process, and wait until the kernel has taken its memory apart: nothing that it mapped is read or
        written after this, nor are transfers of its network card. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and let go of its lanes, which no thread may use any more. Idempotent."""
        self.kill()
        self._close_lanes()
        self._reader.join(_LAST_LINES_SECONDS)

    def describe_end(self) -> str:
        """How the process has ended, and what it said last. Only after `kill`, or once `has_ended`."""
        status = self._process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._reader.join(_LAST_LINES_SECONDS)
        return "; ".join([how, *self._last_lines])

    def _close_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    def _read_lines(self, stream: IO[bytes]) -> None:
        """Mooncake writes a line for each failure, so they are no news for operators."""
        with suppress(ValueError), stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self._last_lines.append(text)
                _log.debug("process %d: %s", self.pid, text)
