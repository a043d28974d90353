"""The service's side of the connection to the keeper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvstow.errors import KeeperBusyError, KeeperError
from kvstow_service.node.survival.keeper import (
    ALREADY_RUNNING,
    BUSY,
    MAX_HELD,
    MESSAGE_FDS,
    VERSION,
    connect,
    is_readable,
    receive,
    send,
    take_apart,
)

_START_SECONDS = 30.0
_ANSWER_SECONDS = 2.0
"""How long a keeper that has sent its welcome may take to answer. The memory thread waits for it."""


def keeper_command(folder: Path, keep_timeout: float, option: str) -> tuple[list[str], dict[str, str]]:
    """The command that becomes the keeper of a state folder, and its environment. For `option`, see `keeper`."""
    module = "kvstow_service.node.survival.keeper"
    command = [sys.executable, "-m", module, str(folder), str(keep_timeout), option]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start_keeper(folder: Path, keep_timeout: float) -> None:
    """Start a keeper, unless there is one. It outlives this process and its process group. Raises `KeeperError`, also
    if the machine has no process or descriptor left."""
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
    """A connection over which a service has descriptors held, and gets them back after a restart.

    `send_hello` first, which does not wait: the keeper has answered when the connection is readable, and `take_welcome`
    takes that answer. Nor do `ask` and `owed_seconds`. All other calls wait for the answer, but not long. Each call
    raises `KeeperError` if the keeper refuses, is gone or does not answer; the connection is of no use then. The keeper
    has duplicates: the caller keeps, uses and closes its own descriptors. Not locked.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._socket = connect(folder, _ANSWER_SECONDS)
        except OSError as error:
            raise KeeperError(f"no keeper answers in {folder}: {error.strerror or error}") from error
        self.pid: int | None = None
        """The number of the keeper's process as the keeper sees it. Known since its welcome."""
        self._asked_at: float | None = None
        """When `ask` has asked, until the answer is taken."""

    def send_hello(self, life: str) -> None:
        """`life` names the service, from its start to its end."""
        self._send({"do": "hello", "version": VERSION, "life": life})

    def has_news(self, seconds: float = 0.0) -> bool:
        """Whether the keeper has answered the hello. Afterwards: whether it is gone."""
        return is_readable(self._socket.fileno(), seconds)

    def take_welcome(self) -> None:
        """Raises `KeeperBusyError` while the process of the service before lives."""
        self.pid = self._receive()[0].get("pid")

    def ask(self) -> None:
        """Ask whether the keeper still answers, without waiting. Not again before that answer has been taken."""
        self._send({"do": "list", "start": MAX_HELD})  # a page with nothing on it
        self._asked_at = time.monotonic()

    def owed_seconds(self) -> float | None:
        """For how long the keeper has owed the answer to `ask`; None if it owes none. Takes the answer if it is there,
        and raises `KeeperError` if the keeper is gone."""
        if self.has_news():
            self._take_answer()
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    def _take_answer(self) -> None:
        """Of `ask`. Raises `KeeperError` if there is none because the keeper is gone."""
        self._receive()
        self._asked_at = None

    def put(self, fds: Mapping[str, int], *, replaces: bool = False) -> None:
        """Have the keeper hold these descriptors, all of them from the same moment on. `replaces`: and nothing else."""
        left = iter(fds.items())
        while batch := dict(islice(left, MESSAGE_FDS)):
            self._request({"do": "put", "labels": list(batch)}, list(batch.values()))
        self._request({"do": "commit", "replaces": replaces})

    def drop(self, labels: Collection[str]) -> None:
        """Have the keeper close these. Labels that are not held are ignored."""
        left = iter(labels)
        while batch := list(islice(left, MESSAGE_FDS)):
            self._request({"do": "drop", "labels": batch})

    def take_all(self) -> dict[str, int]:
        """Everything that is held, as descriptors that the caller owns. The keeper still holds its own."""
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
        """Let the next service come at once, although this process still runs. Closes the connection. `gives_back`: the
        keeper closes everything, and ends."""
        self._request({"do": "end" if gives_back else "leave"})
        self.close()

    def close(self) -> None:
        """Idempotent. The keeper goes on, and accepts the next service once this process has ended."""
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
