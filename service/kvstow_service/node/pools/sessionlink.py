"""What the attach server gives to a session: a way to its connections, and ways to answer later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstow.attach.calls import Found, Pending
from kvstow.attach.wire import Message

Later = Callable[[Callable[[], Found | Pending]], object]
"""Answers a lookup that was `Pending` with what the given call returns. `Pending` means that it takes more time.

Makes the call at once, or never if the client has gone. An error in the call is answered like one in the lookup itself.
Raises nothing."""


class SessionLink(Protocol):
    """Sends messages to a session's connections. Thread-safe. Never waits."""

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker of `rank`, or to the scheduler half. Messages to one receiver arrive in the
        order of the calls. A message is dropped if the receiver is not connected. The caller keeps its descriptors. A
        worker to which descriptors are sent holds memory from then on: see `NodeSession.end_worker`. Raises `OSError`,
        and sends nothing, if this process can have no more descriptors."""
