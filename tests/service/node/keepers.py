"""Keepers in tests: what they hold, and their end."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeper import connect, receive, send, take_apart
from kvstow_service.node.survival.keeperclient import KeeperClient


class KeeperListing(NamedTuple):
    """What a keeper holds. `seconds_left`: how long until it lets go of that; None while a service is connected.
    `refused` counts the requests and connections that it refused."""

    pid: int
    labels: frozenset[str]
    seconds_left: float | None
    refused: int


def look(folder: Path) -> KeeperListing:
    """What a keeper holds, whichever service put it there. Raises `KeeperError` if there is no keeper."""
    labels = set[str]()
    start: int | None = 0
    try:
        with connect(folder, 5.0) as peer:
            while start is not None:
                answer = ask(peer, {"do": "list", "start": start})
                if not answer:
                    raise KeeperError(f"the keeper in {folder} has ended")
                labels.update(answer["labels"])
                start = answer["next"]
    except OSError as error:
        raise KeeperError(f"no keeper answers in {folder}") from error
    return KeeperListing(answer["pid"], frozenset(labels), answer["seconds_left"], answer["refused"])


def ask(peer: socket.socket, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
    """The answer to a request that a `KeeperClient` may never make. Empty if the keeper has ended the connection."""
    try:
        send(peer, request, fds)
        data, _, is_cut = receive(peer)
    except (BrokenPipeError, ConnectionResetError):
        return {}
    return take_apart(data, is_cut) if data else {}


def lose_at_the_keeper(state: Path, label: str) -> None:
    """Have the keeper lose what it holds with this label, while no service runs."""
    client = KeeperClient(state)
    client.send_hello("a test")
    client.take_welcome()
    assert label in look(state).labels
    client.drop([label])
    client.leave()


def end_keeper(folder: Path, number: int = signal.SIGTERM) -> None:
    """End the keeper of this state folder, if there is one, and wait for its end."""
    try:
        pid = look(folder).pid
    except KeeperError:
        return
    pidfd = os.pidfd_open(pid)
    os.kill(pid, number)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


def kinds_held(folder: Path) -> Counter[str]:
    """How many descriptors of each kind the keeper holds. Nothing without a keeper."""
    try:
        return Counter(label.partition("-")[0] for label in look(folder).labels)
    except KeeperError:
        return Counter()
