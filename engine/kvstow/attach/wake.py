"""A descriptor by which any thread can wake the thread that waits for a socket."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress


class Wake:
    """Wakes a thread that waits for sockets. Any thread may call `set`, even after `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def set(self) -> None:
        """End the present `wait`, or the next one."""
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def wait(self, socket_fd: int, seconds: float) -> None:
        """Wait for up to `seconds` until the socket can be read, or another thread calls `set`. The socket may be
        -1."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if socket_fd >= 0:
            poll.register(socket_fd, select.POLLIN)
        if any(fd == self._fd for fd, _ in poll.poll(1000 * seconds)):
            self.clear()

    def fileno(self) -> int:
        """Return a descriptor to poll. It is readable from a call of `set` until `clear` or `wait` has taken it."""
        return self._fd

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Call it when no thread waits any more. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
