"""The service's side of the connection to the keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvstow.errors import KeeperError
from kvstow_service.node.survival import statefolder
from kvstow_service.node.survival.keepermessages import (
    MAX_INFO,
    MAX_NAME,
    MESSAGE_BYTES,
    MESSAGE_FDS,
    VERSION,
    Held,
    receive,
    send,
    take_apart,
)
from kvstow_service.node.survival.keeperprocess import ALREADY_RUNNING

_START_SECONDS = 30.0
_RETRY_SECONDS = 0.01
_PUT_BYTES = MESSAGE_BYTES * 3 // 4  # of names and texts in one request


def keeper_command(folder: Path, keep_timeout: float, option: str) -> tuple[list[str], dict[str, str]]:
    """The command that becomes the keeper of a state folder, and its environment. For `option`, see `keeperprocess`."""
    module = "kvstow_service.node.survival.keeperprocess"
    command = [sys.executable, "-m", module, str(folder), str(keep_timeout), option]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class KeeperListing(NamedTuple):
    """What a keeper holds: texts by name. `seconds_left`: how long until it lets go of that; None while a service is
    connected. `refused` counts the requests and connections that it refused."""

    pid: int
    infos: Mapping[str, str]
    seconds_left: float | None
    refused: int


class KeeperClient:
    """A connection over which a service puts descriptors, and gets them back after a restart. Use `connect` or `start`.

    Each call raises `KeeperError` if the keeper refuses it or is gone. The service then starts another keeper and puts
    everything again. Thread-safe. The keeper has duplicates: the caller keeps, uses and closes its own descriptors.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._lock = threading.Lock()
        try:
            self._socket = statefolder.connect(folder, timeout)
        except OSError as error:
            raise KeeperError(f"no keeper answers in {folder}: {error.strerror or error}") from error

    @classmethod
    def connect(cls, folder: Path, *, timeout: float = 5.0) -> KeeperClient:
        """Connect, as the service, to the keeper that is running. Raises `KeeperError` if there is none, or if the
        previous service has neither left nor ended."""
        client = cls(folder, timeout)
        try:
            client._request({"do": "hello", "version": VERSION})
        except BaseException:
            client.close()
            raise
        return client

    @classmethod
    def start(cls, folder: Path, keep_timeout: float, *, timeout: float = 5.0) -> KeeperClient:
        """Connect to the keeper that is running, or to a new one, which outlives this process and its process group.
        Raises `KeeperError`, also if the machine has no process or descriptor left."""
        statefolder.require_state_folder(folder)

        def replace_ended() -> None:
            if not statefolder.is_locked(folder):  # the running keeper was about to end
                cls._make_keeper(folder, keep_timeout)

        try:
            cls._make_keeper(folder, keep_timeout)
            return cls._wait(folder, timeout, replace_ended)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KeeperError(f"the keeper does not start: {error}") from error

    @staticmethod
    def _make_keeper(folder: Path, keep_timeout: float) -> None:
        """Start a keeper, unless there is one."""
        command, environ = keeper_command(folder, keep_timeout, "--daemon")
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, timeout=_START_SECONDS
        )
        if result.returncode not in (0, ALREADY_RUNNING):
            raise KeeperError(f"the keeper does not start: {result.stderr.strip()}")

    @classmethod
    def wait(cls, folder: Path, timeout: float) -> KeeperClient:
        """Connect to the keeper that starts within `timeout` seconds. Raises `KeeperError` if none does."""
        statefolder.require_state_folder(folder)
        return cls._wait(folder, timeout)

    @classmethod
    def _wait(cls, folder: Path, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> KeeperClient:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return cls.connect(folder)
            except KeeperError:
                # It may hold the lock without listening yet, or the previous service may be ending.
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_SECONDS)
            meanwhile()

    @classmethod
    def look(cls, folder: Path, *, timeout: float = 5.0) -> KeeperListing:
        """What a keeper holds, whichever service put it there. Raises `KeeperError` if there is no keeper."""
        client = cls(folder, timeout)
        try:
            return client.list_held()
        finally:
            client.close()

    def put(self, held: Mapping[str, Held]) -> None:
        """Have the keeper hold these descriptors. Each replaces the one held under its name."""
        items = iter(held.items())
        while batch := dict(self._batch(items)):
            request = {"do": "put", "names": list(batch), "infos": [one.info for one in batch.values()]}
            self._request(request, [one.fd for one in batch.values()])

    def drop(self, names: Collection[str]) -> None:
        """Have the keeper let go of these. Names that are not held are ignored."""
        left = iter(names)
        while batch := list(islice(left, MESSAGE_FDS)):
            self._request({"do": "drop", "names": batch})

    def take_all(self) -> dict[str, Held]:
        """Everything that is held, as descriptors that the caller owns. The keeper still holds its own."""
        taken: dict[str, Held] = {}
        start: int | None = 0
        try:
            while start is not None:
                answer, fds = self._request({"do": "take", "start": start})
                items = answer["items"]
                if len(items) != len(fds):
                    for fd in fds:
                        os.close(fd)
                    raise KeeperError(f"{len(items)} descriptors were kept, but {len(fds)} arrived")
                taken |= {name: Held(fd, info) for (name, info), fd in zip(items, fds, strict=True)}
                start = answer["next"]
        except BaseException:
            for held in taken.values():
                os.close(held.fd)
            raise
        return taken

    def list_held(self) -> KeeperListing:
        infos: dict[str, str] = {}
        start: int | None = 0
        while start is not None:
            answer, _ = self._request({"do": "list", "start": start})
            infos |= dict(answer["items"])
            start = answer["next"]
        return KeeperListing(answer["pid"], infos, answer["seconds_left"], answer["refused"])

    def leave(self) -> None:
        """Let the next service connect at once, although this process still runs. Closes the connection."""
        self._request({"do": "leave"})
        self.close()

    def end(self) -> None:
        """Have the keeper let go of everything and end. Closes the connection."""
        self._request({"do": "end"})
        self.close()

    def fileno(self) -> int:
        """Readable only when the keeper is gone."""
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent. The keeper continues, and treats this as the end of its service."""
        self._socket.close()

    @staticmethod
    def _batch(items: Iterator[tuple[str, Held]]) -> Iterator[tuple[str, Held]]:
        """As many items as fit in one message."""
        size = 0
        for number, (name, held) in enumerate(items, 1):
            if len(name) > MAX_NAME or len(held.info) > MAX_INFO:
                raise KeeperError(f"{name[:MAX_NAME]} is longer than {MAX_NAME}, or its text longer than {MAX_INFO}")
            yield name, held
            size += len(json.dumps([name, held.info]))
            if number == MESSAGE_FDS or size > _PUT_BYTES:
                return

    def _request(self, request: dict[str, Any], fds: Collection[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                send(self._socket, request, list(fds))
                data, received, is_cut = receive(self._socket)
            except OSError as error:
                self.close()  # a late answer would be mistaken for that of the next request
                raise KeeperError(f"the keeper is gone: {error.strerror or error}") from error
        if not data:
            raise KeeperError("the keeper is gone")
        answer = take_apart(data, False)
        if is_cut or not answer["ok"]:
            for fd in received:
                os.close(fd)
            raise KeeperError(answer.get("error", "this process has too few file descriptors left (ulimit -n)"))
        return answer, received
