"""A keeper that loses what it has, and what it is sent: `python faultykeeper.py STATE SEED`.

It answers as a keeper does. Some of the descriptors that it is given it never holds; on SIGUSR1 it loses some of those
that it holds. Sometimes it ends the connection in place of an answer, or answers late.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvstow_service.node.survival.keeper import Keeper, KeeperPeer, listen, require_state_folder, try_lock

_LATE_SECONDS = 3.0
"""Longer than a service waits for an answer."""


class FaultyKeeper(Keeper):
    chance: random.Random

    def _commit(self, connection: KeeperPeer, *, replaces: bool) -> None:
        for label in self._some(list(connection.staged), 0.05):
            os.close(connection.staged.pop(label))
        super()._commit(connection, replaces=replaces)

    def _answer(
        self, connection: KeeperPeer, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        answer = super()._answer(connection, request, fds)
        if request.get("do") in ("put", "commit", "drop", "hello"):
            fault = self.chance.random()
            if fault < 0.02:
                raise OSError("the answer is lost")
            if fault < 0.025:
                time.sleep(_LATE_SECONDS)
        return answer

    def lose(self) -> None:
        for label in self._some(list(self._held), 0.3):
            os.close(self._held.pop(label))

    def _some(self, labels: list[str], probability: float) -> list[str]:
        """None of them in most cases."""
        return [one for one in labels if self.chance.random() < 0.3] if self.chance.random() < probability else []


def main() -> None:
    folder = require_state_folder(Path(sys.argv[1]))
    assert try_lock(folder) is not None
    keeper = FaultyKeeper(listen(folder), 600.0, stays=True)
    keeper.chance = random.Random(int(sys.argv[2]))
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    print("ready", flush=True)
    while keeper.step(0.05):
        if asked:
            asked.clear()
            keeper.lose()


if __name__ == "__main__":
    main()
