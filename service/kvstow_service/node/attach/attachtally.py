"""What the attach server counts and logs about its clients."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstow.attach.kinds import Kind
from kvstow_api.limitedlog import LimitedLog

logger = logging.getLogger("kvstow.attach")

REASONS = (
    *("hello_timeout", "identity", "memory", "no_descriptors", "no_pidfd", "peer_ended", "rank", "sharing_off"),
    *("too_many_clients", "too_many_lost", "too_many_strangers", "uid", "unknown_token", "version"),
    *("fds_missing", "fds_unwanted", "internal", "malformed", "no_hello", "slow_reader", "too_long", "too_many_fds"),
    "unexpected",
)
"""Why connections are refused. From `fds_missing` on, why they are ended."""

_LINES_A_MINUTE = 10


class AttachFigures(NamedTuple):
    """What the attach server has counted. `refused`: connections that were refused or ended, by reason. `errors`: calls
    that failed, by code. `frames`: frames that were received and allowed, by kind. `partial_bytes`: bytes of incomplete
    frames."""

    clients: int
    strangers: int
    sessions: int
    partial_bytes: int
    accepted: int
    frames: Counter[str]
    refused: Counter[str]
    errors: Counter[str]


class AttachTally:
    """Written by the attach server's thread. Any thread may call `figures`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.accepted = 0
        self.frames: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._refusals = LimitedLog(logger, clock, burst=_LINES_A_MINUTE)
        self._faults = LimitedLog(logger, clock, burst=_LINES_A_MINUTE)

    def refuse(self, reason: str, sentence: str) -> None:
        """Count a connection that was refused or ended because of what its client did."""
        self.refused[reason] += 1
        self._refusals.warning("a connection to the attach socket was ended (%s): %s", reason, sentence)

    def fault(self, error: BaseException) -> None:
        """Count an error that is the service's own."""
        self.errors["internal"] += 1
        self._faults.log(logging.ERROR, "the attach server has failed for one client", exc_info=error)

    def figures(self, *, clients: int, strangers: int, sessions: int, partial_bytes: int) -> AttachFigures:
        return AttachFigures(
            clients=clients,
            strangers=strangers,
            sessions=sessions,
            partial_bytes=partial_bytes,
            accepted=self.accepted,
            frames=Counter({Kind(kind).name.lower(): count for kind, count in dict(self.frames).items()}),
            refused=Counter(dict(self.refused)),
            errors=Counter(dict(self.errors)),
        )
