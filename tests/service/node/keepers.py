"""Keepers in tests: what they hold, and their end."""

from __future__ import annotations

import os
import select
import signal
from collections import Counter
from pathlib import Path

from kvstow.errors import KeeperError
from kvstow_service.node.survival.keeperclient import KeeperClient


def end_keeper(folder: Path, number: int = signal.SIGTERM) -> None:
    """End the keeper of this state folder, if there is one, and wait for its end."""
    try:
        pid = KeeperClient.look(folder).pid
    except KeeperError:
        return
    pidfd = os.pidfd_open(pid)
    os.kill(pid, number)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


def kinds_held(folder: Path) -> Counter[str]:
    """How many descriptors of each kind the keeper holds. Nothing without a keeper."""
    try:
        return Counter(label.partition("-")[0] for label in KeeperClient.look(folder).labels)
    except KeeperError:
        return Counter()
