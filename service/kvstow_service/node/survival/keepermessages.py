"""Messages between the service and its keeper: JSON and descriptors, one message per packet.

A keeper outlives the services that use it, and so their versions. The messages do not change.
"""

from __future__ import annotations

import array
import json
import select
import socket
from collections.abc import Sequence
from typing import Any

VERSION = 1
MESSAGE_BYTES = 64 << 10
MESSAGE_FDS = 200  # the kernel takes 253
MAX_LABEL, MAX_HELD = 128, 8192
BUSY = "busy"
"""Why a hello is refused while the process of the service before lives."""

_MAGIC = b"KVK1"


class Garbage(Exception):
    """A message that no program of KVStow sends."""


def receive(peer: socket.socket) -> tuple[bytes, list[int], bool]:
    """A message, its descriptors, which the caller owns, and whether a part of either was cut off."""
    room = socket.CMSG_SPACE(253 * array.array("i").itemsize)
    data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether a socket or a pidfd has news within so many seconds. For any number: there are more than 1,024."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def send(peer: socket.socket, message: dict[str, Any], fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    peer.sendmsg([_MAGIC + json.dumps(message, separators=(",", ":")).encode()], ancillary)


def take_apart(data: bytes, is_cut: bool) -> dict[str, Any]:
    """The content of a message. Raises `Garbage`."""
    if is_cut or not data.startswith(_MAGIC):
        raise Garbage
    try:
        message = json.loads(data[len(_MAGIC) :])
    except (ValueError, RecursionError) as error:
        raise Garbage from error
    if not isinstance(message, dict):
        raise Garbage
    return message
