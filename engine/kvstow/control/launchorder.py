"""When the loads of ranks with a `Launcher` are launched: in one step on all ranks, in one order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvstow.messages import Completion, LoadLaunch, Op, StagedLoad


@dataclass(slots=True)
class _Load:
    """`staged`: the pieces that each rank has staged; infinitely many once the load has ended there."""

    num_blocks: int
    staged: list[float]
    launched: int = 0


class LaunchOrder:
    """Names the loads that every rank has staged, for the next step. What the ranks launch then depends on the plans
    alone, and not on how fast each of them copies.

    A rank on which a load has ended delays the others no longer, and launches what is named as they do. Reports may be
    repeated or late: those of loads that have ended everywhere are `stale`. Used by the thread that plans the steps.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[int, _Load] = {}
        self._changed: set[int] = set()
        self.stale = 0

    def expect(self, ops: Iterable[Op]) -> None:
        """These are part of the next plan. Stores are launched with it."""
        for op in ops:
            if op.direction == "load":
                self._loads[op.op_id] = _Load(len(op.blocks), [0] * self._num_ranks)

    def note(self, rank: int, staged: Iterable[StagedLoad], completions: Iterable[Completion]) -> None:
        """What a rank has reported after a step."""
        for one in staged:
            self._note(rank, one.op_id, one.num_pieces)
        for completion in completions:
            if completion.mark != "source_free" and completion.op_id in self._loads:
                self._note(rank, completion.op_id, math.inf)

    def take(self) -> tuple[LoadLaunch, ...]:
        """The launches of the next step, in the order of the plans. O(loads that ranks have reported since)."""
        launches = []
        for op_id in sorted(self._changed):
            load = self._loads[op_id]
            ready = min(load.staged)
            if ready == math.inf:
                del self._loads[op_id]
            elif ready > load.launched:
                launches.append(LoadLaunch(op_id, load.num_blocks, load.launched, int(ready)))
                load.launched = int(ready)
        self._changed.clear()
        return tuple(launches)

    def __len__(self) -> int:
        """Loads that have not ended on every rank."""
        return len(self._loads)

    def _note(self, rank: int, op_id: int, num_pieces: float) -> None:
        load = self._loads.get(op_id)
        if load is None or load.staged[rank] >= num_pieces:
            self.stale += 1
            return
        load.staged[rank] = num_pieces
        self._changed.add(op_id)
