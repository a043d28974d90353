"""What the ranks of a replay have copied: stores count when they end, loads once they are verified."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvstow.messages import Completion, Direction
from kvstow_service.replay.kv import Verification
from kvstow_service.replay.result import Tally

_log = logging.getLogger("kvstow.replay")


@dataclass(slots=True)
class _Moved:
    """Bytes that the ranks have copied for an op, and how long that took, added up."""

    num_bytes: int = 0
    seconds: float = 0.0


class CopyTally:
    """Counts in `tally`. Used by one thread."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._moved: dict[int, _Moved] = {}
        """By loads that some rank has not finished."""
        self._unverified: deque[tuple[int, _Moved]] = deque()
        """Blocks, and what was moved, of loads that are being verified, in order."""

    def add(self, completion: Completion, direction: Direction) -> None:
        """A rank has copied what the op asked for."""
        if direction == "load":
            moved = self._moved.setdefault(completion.op_id, _Moved())
            moved.num_bytes += completion.num_bytes
            moved.seconds += completion.seconds
        else:
            self._tally.stored_bytes += completion.num_bytes
            self._tally.store_seconds += completion.seconds

    def fail_load(self, op_id: int, blocks: int) -> None:
        self._moved.pop(op_id, None)
        self._tally.failed_loads += blocks

    def begin_verifying(self, op_id: int, blocks: int) -> None:
        """All ranks have finished the load, and its verification comes after those that have begun."""
        self._unverified.append((blocks, self._moved.pop(op_id, _Moved())))

    def end_verifying(self, verifications: Iterable[Verification]) -> None:
        """In the order in which they have begun. What was loaded counts from now on, so that the figures match at any
        time."""
        tally = self._tally
        for found in verifications:
            blocks, moved = self._unverified.popleft()
            tally.loaded_blocks += blocks
            tally.loaded_bytes += moved.num_bytes
            tally.load_seconds += moved.seconds
            tally.verified_bytes += found.num_bytes
            if found.mismatches:
                tally.count_mismatches(found.mismatches)
                _log.error("%d blocks loaded wrong; the first: %s", len(found.mismatches), tally.first_mismatches)
