"""Requests to stop the process: signals and failures."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import NamedTuple, Self

logger = logging.getLogger("kvstow.service")

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR)
_LEFT_ALONE = frozenset(
    {signal.SIGKILL, signal.SIGSTOP}  # no process can handle these
    | {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}  # their default does nothing
    | {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}  # a terminal sends these to stop a process for a while
    | {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }  # faults
)
_SIGNALS = tuple(sorted(set(signal.valid_signals()) - _LEFT_ALONE))
"""All signals whose default would end the process without its clean-up, real-time signals included."""


class Stop(NamedTuple):
    """A request to stop: the reason, for the log, and the exit status."""

    reason: str
    status: int


class StopRequests:
    """A context manager, for the main thread, that turns SIGTERM, SIGINT, SIGQUIT, SIGXCPU and SIGPWR into requests
    with status 0.

    The first request counts. A second such signal sets `hurried`, which cuts the waits before the clean-up short; the
    clean-up itself is never skipped. SIGHUP calls `on_reload`, on a thread. All other signals that would end the
    process, such as SIGALRM and SIGUSR1, do nothing. A signal that is ignored, as SIGHUP is under nohup, stays ignored.

    No signal is lost or delayed while the main thread waits. A Python handler cannot guarantee that: a signal that
    arrives just before the main thread blocks on a lock is handled only after that wait. So the C handler writes the
    signal's number to a socket, which a separate thread reads.
    """

    def __init__(self) -> None:
        self.on_reload: Callable[[], object] = lambda: None
        self.requested = threading.Event()
        """Set by the first request, but never in a signal handler, which could interrupt a holder of the lock."""
        self.hurried = threading.Event()
        """Set by a second signal."""
        self._requests: SimpleQueue[Stop] = SimpleQueue()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # required by set_wakeup_fd
        self._thread = threading.Thread(target=self._watch, name="kvstow-signals", daemon=True)

    def __enter__(self) -> Self:
        self._handlers = {
            number: signal.signal(number, _leave_to_watcher)
            for number in _SIGNALS
            if signal.getsignal(number) not in (signal.SIG_IGN, None)  # None: a handler that is not Python's
        }
        self._wakeup_fd = signal.set_wakeup_fd(self._sender.fileno())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def request(self, reason: str, status: int) -> None:
        """Ask the process to stop. Thread-safe."""
        self._requests.put(Stop(reason, status))
        self.requested.set()

    def wait(self) -> Stop:
        """Wait for the first request."""
        return self._requests.get()

    def _watch(self) -> None:
        signalled = False
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number == signal.SIGHUP:
                    self._reload()
                if number not in _STOPPING:
                    continue
                if signalled:
                    self.hurried.set()
                signalled = True
                self.request(signal.Signals(number).name, 0)

    def _reload(self) -> None:
        try:
            self.on_reload()
            logger.info("SIGHUP: the TLS files are read again; token files are read whenever a client shows a token")
        except Exception:
            logger.exception("SIGHUP: reloading failed")


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Python writes a signal's number to the socket only if it has a Python handler."""
