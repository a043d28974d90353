"""Messages between the service and its child processes.

They are pickled, because a child runs this package's code with the service's rights. The socket keeps the borders of
messages, so a reader never waits for the second half of a message."""

from __future__ import annotations

import pickle
import socket
from typing import Any

MAX_MESSAGE_BYTES = 160 << 10  # less than the kernel's send buffer, 208 KiB, which holds a message whole


class MessageSocket:
    """One end of the socket. Any thread may send, and one may receive. Where one of them gives a timeout, only one
    thread may use the end at a time."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @classmethod
    def inherited(cls, fd: int) -> MessageSocket:
        """Return the end that a child process has inherited, and keep it from processes of the child."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    def send(self, message: object, *fds: int, timeout: float | None = None) -> None:
        """Send a message, and wait at most `timeout` seconds for room. Raises `TimeoutError`, or `EOFError` if the
        other end was closed."""
        self.end.settimeout(timeout)
        try:
            socket.send_fds(self.end, [pickle.dumps(message)], fds)
        except ConnectionError:
            raise EOFError("the other end was closed") from None

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """Wait for a message, and return it and its descriptors, which the caller then owns. Raises the same errors as
        `send`."""
        self.end.settimeout(timeout)
        try:
            data, fds, _, _ = socket.recv_fds(self.end, MAX_MESSAGE_BYTES, 1)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise EOFError("the other end was closed")
        return pickle.loads(data), fds
