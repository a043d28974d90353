"""Which loads have ended on every host. Used by the scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterable

from kvstow_service.connectors.engine_core.stepplan import PlannedStep
from kvstow_service.connectors.engine_core.workerside import LoadId


class EndedLoads:
    """Counts the hosts that have reported the end of a load. vLLM's own count does not work: it would wait for as many
    workers as there are chips. It also knows only requests, and a request may load more than once.

    A load is expected from its plan on, until each host has reported it. Reports that are repeated or late are `stale`.
    """

    def __init__(self) -> None:
        self._waiting: dict[LoadId, set[int]] = {}
        self._ended: set[str] = set()
        self.stale = 0

    def expect(self, plan: PlannedStep) -> None:
        for request_id in (*plan.load_requests, *plan.lost_loads):
            self._waiting[LoadId(request_id, plan.number)] = set()

    def add(self, rank: int, loads: Iterable[LoadId], num_ranks: int) -> None:
        """`rank` of `num_ranks` has reported these."""
        for load in loads:
            ranks = self._waiting.get(load)
            if ranks is None or rank in ranks:
                self.stale += 1
                continue
            ranks.add(rank)
            if len(ranks) == num_ranks:
                del self._waiting[load]
                self._ended.add(load.request_id)

    def take_ended(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended
