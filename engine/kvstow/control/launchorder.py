"""Decides when ranks with a `Launcher` launch their loads: all ranks launch them in the same step and in the same
order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvstow.messages import Completion, LoadLaunch, Op, StagedLoad


@dataclass(slots=True)
class _Load:
    """A load that has not ended on every rank. `staged`: how many pieces each rank has staged, or infinity once the
    load has ended there. `launched`: how many pieces have been named for launch."""

    num_blocks: int
    staged: list[float]
    launched: int = 0


class LaunchOrder:
    """Names the loads that every rank has staged, for the next step. What the ranks launch then depends on the plans
    alone, and not on how fast each of them copies.

    A rank on which a load has ended does not delay the others any more, and launches the named pieces as they do.
    Reports may be repeated or late; such reports are counted in `stale`. Only the thread that plans the steps uses it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[int, _Load] = {}
        self._changed: set[int] = set()
        self.stale = 0

    def expect(self, ops: Iterable[Op]) -> None:
        """Track the loads among these ops, which are part of the next plan. Stores are launched with the plan."""
        for op in ops:
            if op.direction == "load":
                self._loads[op.op_id] = _Load(len(op.blocks), [0] * self._num_ranks)

    def note(self, rank: int, staged: Iterable[StagedLoad], completions: Iterable[Completion]) -> None:
        """Note what a rank has reported after a step: how many pieces of its loads it has staged, and its
        completions."""
        for one in staged:
            self._note(rank, one.op_id, one.num_pieces)
        for completion in completions:
            if completion.mark != "source_free" and completion.op_id in self._loads:
                self._note(rank, completion.op_id, math.inf)

    def take(self) -> tuple[LoadLaunch, ...]:
        """Return the launches of the next step, in the order of the plans. O(loads that ranks have reported since the
        last call)."""
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
        """How many loads have not ended on every rank."""
        return len(self._loads)

    def _note(self, rank: int, op_id: int, num_pieces: float) -> None:
        load = self._loads.get(op_id)
        if load is None or load.staged[rank] >= num_pieces:
            self.stale += 1
            return
        load.staged[rank] = num_pieces
        self._changed.add(op_id)
