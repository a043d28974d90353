"""The messages between this process and a child of it. Each lane has one request at a time, which has one answer.

Requests and answers are pickled, because the child runs this package's code with this process's rights. The socket
keeps the borders of messages, so a reader never waits for the second half of a message."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from kvstow_service.stores.mooncake.objects import SlotObject

CORRUPT = -1_000_000
"""A status code of KVStow: an object was found, but it is not the one that was put under its name."""
MAX_MESSAGE_BYTES = 160 << 10  # less than the kernel's send buffer, 208 KiB, which holds a message whole
_MAX_FDS = 1


class Connect(NamedTuple):
    """The first message: connect to the store."""

    local_host: str
    master: str
    protocol: str
    devices: str
    replicas: int


class AddMemory(NamedTuple):
    """Map and register the memfd that comes with this."""

    range_id: int
    num_bytes: int


class RemoveMemory(NamedTuple):
    range_id: int


class Move(NamedTuple):
    kind: Literal["put", "get"]
    objects: tuple[SlotObject, ...]


class Exists(NamedTuple):
    names: tuple[str, ...]


Answer = tuple[int, ...] | str
"""A status code for each object or name, or a text that says why the request was refused. Then no memory was
touched."""


class Lane:
    """One end of a lane. Not locked. Only one thread may use it at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: object, *, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send a message, and wait at most `timeout` seconds for room. Raises `TimeoutError`, or `EOFError` if the
        other end was closed."""
        self._socket.settimeout(timeout)
        try:
            socket.send_fds(self._socket, [pickle.dumps(message)], fds)
        except (BrokenPipeError, ConnectionError):
            raise EOFError("the other end of the lane was closed") from None

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """Wait for a message, and return it and its file descriptors, which the caller then owns. Raises the same
        errors as `send`."""
        self._socket.settimeout(timeout)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, _MAX_FDS)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise EOFError("the other end of the lane was closed")
        return pickle.loads(data), fds

    def close(self) -> None:
        self._socket.close()
