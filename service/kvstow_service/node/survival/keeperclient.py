"""The service's side of the connection to the keeper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvstow.errors import KeeperBusyError, KeeperError
from kvstow_service.node.survival.keeper import (
    ALREADY_RUNNING,
    BUSY,
    MAX_HELD,
    MESSAGE_FDS,
    SOCKET,
    VERSION,
    connect,
    is_readable,
    receive,
    send,
    take_apart,
)

_START_SECONDS = 30.0
"""How long the start of a keeper may take."""
_ANSWER_SECONDS = 2.0
"""How long a keeper that has sent its welcome may take for an answer. The memory thread waits for it meanwhile."""


def keeper_command(folder: Path, keep_timeout: float, option: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the keeper of a state folder, and its environment. For `option`, see `keeper`."""
    module = "kvstow_service.node.survival.keeper"
    command = [sys.executable, "-m", module, str(folder), str(keep_timeout), option]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start_keeper(folder: Path, keep_timeout: float) -> None:
    """Start a keeper, unless one is running. It outlives this process and its process group. Raises `KeeperError`, also
    if the machine has no free process number or descriptor."""
    command, environ = keeper_command(folder, keep_timeout, "--daemon")
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, timeout=_START_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeeperError(f"the keeper does not start: {error}") from error
    if result.returncode not in (0, ALREADY_RUNNING):
        raise KeeperError(f"the keeper does not start: {result.stderr.strip()}")


class KeeperClient:
    """A connection to the keeper. It hands descriptors to the keeper, and gets them back after a restart.

    Call `send_hello` first. It does not wait: the connection becomes readable when the keeper has answered, and
    `take_welcome` takes that answer. `ask` and `owed_seconds` do not wait either. All other calls wait a short time for
    the answer. Every call raises `KeeperError` if the keeper refuses, has ended or does not answer, and the connection
    cannot be used after that. The keeper gets duplicates: the caller still owns its own descriptors. Not thread-safe.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        try:
            self._socket = connect(folder, _ANSWER_SECONDS)
        except FileNotFoundError as error:
            raise KeeperError(f"none has its socket in {folder}") from error
        except OSError as error:
            raise KeeperError(f"none answers in {folder}: {error.strerror or error}") from error
        self._path = folder / SOCKET
        self._inode = _inode_of(self._path)
        self.pid: int | None = None
        """The process number of the keeper in the keeper's own pid namespace. Known after the welcome."""
        self._asked_at: float | None = None
        """When `ask` sent its request. None unless an answer to it is outstanding."""

    def can_be_found(self) -> bool:
        """Whether the next service would find this keeper: its socket is still in the state folder."""
        return self._inode is not None and _inode_of(self._path) == self._inode

    def send_hello(self, life: str) -> None:
        """Greet the keeper. `life` identifies this run of the service."""
        self._send({"do": "hello", "version": VERSION, "life": life})

    def has_news(self, seconds: float = 0.0) -> bool:
        """Whether the keeper has answered the hello. After the welcome: whether it has ended or answered `ask`."""
        return is_readable(self._socket.fileno(), seconds)

    def take_welcome(self) -> None:
        """Take the answer to the hello. Raises `KeeperBusyError` while the process of the previous service lives."""
        self.pid = self._receive()[0].get("pid")

    def ask(self) -> None:
        """Ask the keeper whether it still answers, without waiting. Do not ask again before `owed_seconds` has taken
        the answer."""
        self._send({"do": "list", "start": MAX_HELD})  # a page with nothing on it
        self._asked_at = self._clock()

    def owed_seconds(self) -> float | None:
        """Return for how long the keeper has owed the answer to `ask`, or None if it owes none. This takes an answer
        that has arrived. Raises `KeeperError` if the keeper has ended."""
        if self.has_news():
            self._take_answer()
        return None if self._asked_at is None else self._clock() - self._asked_at

    def _take_answer(self) -> None:
        """Take the answer to `ask`. Raises `KeeperError` if the keeper has ended instead."""
        self._receive()
        self._asked_at = None

    def put(self, fds: Mapping[str, int], *, replaces: bool = False) -> None:
        """Have the keeper hold these descriptors. It takes all of them in one step. With `replaces`, it closes all
        others that it holds."""
        left = iter(fds.items())
        while batch := dict(islice(left, MESSAGE_FDS)):
            self._request({"do": "put", "labels": list(batch)}, list(batch.values()))
        self._request({"do": "commit", "replaces": replaces})

    def drop(self, labels: Collection[str]) -> None:
        """Have the keeper close the descriptors with these labels. It ignores labels that it does not hold."""
        left = iter(labels)
        while batch := list(islice(left, MESSAGE_FDS)):
            self._request({"do": "drop", "labels": batch})

    def take_all(self) -> dict[str, int]:
        """Return duplicates of all held descriptors, which the caller owns. The keeper still holds its own."""
        taken: dict[str, int] = {}
        start: int | None = 0
        try:
            while start is not None:
                answer, fds = self._request({"do": "take", "start": start})
                if len(answer["labels"]) != len(fds):
                    for fd in fds:
                        os.close(fd)
                    raise KeeperError(f"{len(answer['labels'])} descriptors were kept, but {len(fds)} arrived")
                taken |= zip(answer["labels"], fds, strict=True)
                start = answer["next"]
        except BaseException:
            for fd in taken.values():
                os.close(fd)
            raise
        return taken

    def leave(self, *, gives_back: bool = False) -> None:
        """Tell the keeper that it may accept the next service at once, although this process still runs. With
        `gives_back`, the keeper also closes everything, and ends."""
        self._request({"do": "end" if gives_back else "leave"})
        self.close()

    def close(self) -> None:
        """Close the connection. The keeper continues, and accepts the next service once this process has ended.
        Idempotent."""
        self._socket.close()

    def _request(self, request: dict[str, Any], fds: Collection[int] = ()) -> tuple[dict[str, Any], list[int]]:
        if self._asked_at is not None:
            self._take_answer()
        self._send(request, fds)
        return self._receive()

    def _send(self, request: dict[str, Any], fds: Collection[int] = ()) -> None:
        try:
            send(self._socket, request, list(fds))
        except OSError as error:
            raise KeeperError(f"the keeper is gone: {error.strerror or error}") from error

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            data, received, is_cut = receive(self._socket)
        except OSError as error:
            raise KeeperError(f"the keeper does not answer: {error.strerror or error}") from error
        try:
            if not data:
                raise KeeperError("the keeper is gone")
            answer = take_apart(data, False)
            if is_cut:
                raise KeeperError("this process has too few file descriptors left (ulimit -n)")
            if answer.get("ok") is not True:
                failure = KeeperBusyError if answer.get("reason") == BUSY else KeeperError
                raise failure(str(answer.get("error")))
        except BaseException as error:
            for fd in received:
                os.close(fd)
            if isinstance(error, ValueError):
                raise KeeperError("the keeper's answer cannot be read") from error
            raise
        return answer, received


def _inode_of(path: Path) -> tuple[int, int] | None:
    """Return what identifies the file at this path, or None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
