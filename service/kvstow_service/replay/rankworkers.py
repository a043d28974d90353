"""The workers of all ranks, as a replay uses them: plans go to every one, completions come from each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstow.messages import Completion, Op, StepPlan


class RankWorker(Protocol):
    """What the replay needs of a rank's worker."""

    @property
    def boot_id(self) -> str: ...

    def submit(self, plan: StepPlan) -> None: ...

    def take_completions(self) -> list[Completion]: ...

    def wait_completions(self, timeout: float) -> bool: ...


class RankCompletions(NamedTuple):
    rank: int
    boot_id: str
    completions: list[Completion]


class RankWorkers:
    """Knows which ops each rank has not finished. Used by one thread."""

    def __init__(self, workers: Sequence[RankWorker]) -> None:
        self._workers = workers
        self._outstanding: list[set[int]] = [set() for _ in workers]

    def __len__(self) -> int:
        return len(self._workers)

    def submit(self, ops: Sequence[Op]) -> None:
        """One step of every rank, after what its device was given so far."""
        plan = StepPlan(tuple(ops))
        for worker, outstanding in zip(self._workers, self._outstanding, strict=True):
            outstanding.update(op.op_id for op in plan.ops)
            worker.submit(plan)

    def take_completions(self) -> Iterator[RankCompletions]:
        """Of each rank that has any."""
        for rank, worker in enumerate(self._workers):
            completions = worker.take_completions()
            if completions:
                self._outstanding[rank].difference_update(one.op_id for one in completions if one.mark != "source_free")
                yield RankCompletions(rank, worker.boot_id, completions)

    def wait(self, timeout: float) -> bool:
        """Wait for completions of the first rank that has an op. False, at once, if none has."""
        for worker, outstanding in zip(self._workers, self._outstanding, strict=True):
            if outstanding:
                worker.wait_completions(timeout)
                return True
        return False
