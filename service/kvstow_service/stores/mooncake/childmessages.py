"""What this process and a child of it send each other, over lanes: one request at a time, each with one answer.

Both are pickled: the child runs this package's code with this process's rights. The socket keeps the borders of
messages, so half a message never holds up who reads."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

CORRUPT = -1_000_000
"""A status code of ours: an object was found, and is not what was put under its name."""
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
    """Map and register `num_bytes` of the memfd that comes with this, from `offset` on."""

    range_id: int
    num_bytes: int
    offset: int


class RemoveMemory(NamedTuple):
    range_id: int


class SlotPart(NamedTuple):
    """An object, and its slot: `num_bytes` at `offset` in a range."""

    fingerprint: str
    name: str
    range_id: int
    offset: int
    num_bytes: int


class Move(NamedTuple):
    kind: Literal["put", "get"]
    objects: tuple[SlotPart, ...]


class Exists(NamedTuple):
    names: tuple[str, ...]


Answer = tuple[int, ...] | str
"""A status code for each object or name; or why nothing was touched."""


class Lane:
    """One end. Not locked: one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: object, *, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Raises `TimeoutError`, and `EOFError` if the other end was closed."""
        self._socket.settimeout(timeout)
        try:
            socket.send_fds(self._socket, [pickle.dumps(message)], fds)
        except (BrokenPipeError, ConnectionError):
            raise EOFError("the other end of the lane was closed") from None

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """A message, and its file descriptors, which are the caller's. Raises as `send` does."""
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
