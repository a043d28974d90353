"""What survives the service: descriptors at the keeper. When the keeper is gone, a new one takes its place."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeperclient import KeeperClient
from kvstow_service.node.survival.keepermessages import Held

logger = logging.getLogger("kvstow.keeper")

_WAIT_SECONDS = 30.0
"""How long to wait for a keeper that others start, such as the kubelet."""


class SurvivingMemory:
    """An `ExtentKeeper` for extents, the journal and the pidfds of engines.

    It remembers what was put. When the keeper is gone, it starts another one, or finds the one that others have
    started, and puts everything again. Nothing that the service does fails because of the keeper; `notice` reports the
    problem meanwhile. The caller keeps its descriptors open until it has dropped them. Not locked: one thread at a
    time.
    """

    def __init__(self, folder: Path, keep_timeout: float | None) -> None:
        """Connects to the keeper of the state folder, and starts one if there is none. If `keep_timeout` is None, it
        starts none, but waits for the keeper that others start. Raises `KeeperError` if the folder cannot be used, if
        the previous service is still there, or if no keeper has come."""
        self._folder, self._keep_timeout = folder, keep_timeout
        self._held: dict[str, Held] = {}
        self._client: KeeperClient | None = self._connect(_WAIT_SECONDS)
        self.notice: str | None = None
        """A sentence for users while there is no keeper; otherwise None."""
        self.restarts = 0
        """How many keepers have replaced one that was gone."""

    def take_all(self) -> dict[str, Held]:
        """What the previous service has left, as descriptors that the caller owns. The keeper holds it until it is
        dropped or put again. Call this first. Raises `KeeperError`."""
        if self._client is None:
            raise KeeperError(self.notice or "there is no keeper")
        taken = self._client.take_all()
        self._held = {**taken, **self._held}
        return taken

    def put(self, extents: Mapping[str, tuple[int, str]]) -> None:
        held = {name: Held(fd, info) for name, (fd, info) in extents.items()}
        self._held |= held
        self._tell(partial(KeeperClient.put, held=held))

    def drop(self, names: Collection[str]) -> None:
        for name in names:
            self._held.pop(name, None)
        self._tell(partial(KeeperClient.drop, names=names))

    def check(self) -> None:
        """Replace a keeper that is gone. Call it regularly: other calls notice the loss only when they need the
        keeper."""
        if self._client is not None and select.select([self._client], [], [], 0)[0]:
            self._lose("it has ended")
        if self._client is None:
            self._restart()

    def leave(self) -> None:
        """Leave the memory with the keeper for `keep_timeout`: for `--keep-on-stop`."""
        self._finish(KeeperClient.leave)

    def end(self) -> None:
        """Have the keeper let go of everything and end."""
        self._finish(KeeperClient.end)

    def _tell(self, request: Callable[[KeeperClient], None]) -> None:
        if self._client is None:
            self._restart()
            return
        try:
            request(self._client)
        except KeeperError as error:
            self._lose(str(error))
            self._restart()

    def _connect(self, wait: float) -> KeeperClient:
        if self._keep_timeout is None:
            return KeeperClient.wait(self._folder, wait)
        return KeeperClient.start(self._folder, self._keep_timeout)

    def _lose(self, why: str) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        notice = f"the memory would not survive the service, as there is no keeper: {why}"
        if notice != self.notice:  # it is retried every second
            self.notice = notice
            logger.warning("%s", notice)

    def _restart(self) -> None:
        """Have another keeper hold everything."""
        client = None
        try:
            client = self._connect(0)
            client.drop(client.list_held().infos)
            client.put(self._held)
        except KeeperError as error:
            if client is not None:
                client.close()
            self._lose(str(error))
            return
        self._client, self.notice = client, None
        self.restarts += 1
        logger.warning("another keeper holds everything")

    def _finish(self, request: Callable[[KeeperClient], None]) -> None:
        client, self._client = self._client, None
        self._held.clear()
        if client is None:
            return
        try:
            request(client)
        except KeeperError as error:
            logger.warning("the keeper was not told that the service ends: %s", error)
            client.close()
