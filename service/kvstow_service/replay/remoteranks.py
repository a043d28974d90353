"""The ranks of an engine in processes of their own, as the engine sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self

from kvstow.attach.hello import SessionTicket
from kvstow.errors import ProcessEndedError
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow.messages import Completion, StepPlan
from kvstow_service.replay.kv import Verification
from kvstow_service.replay.processes import Child
from kvstow_service.replay.rankprocess import Rank, RankNews, RankSpec, run_rank

_P = ParamSpec("_P")


class RemoteRank:
    """One rank: a `RankWorker`."""

    def __init__(self, spec: RankSpec) -> None:
        self.child, self.rank = Child(run_rank, spec), spec.rank
        self.boot_id = ""
        """Of the completions that were taken last. Empty until the rank has its KV cache."""
        self.usable_slots = 0
        self.found: deque[Verification] = deque()
        """In the order of the checks."""
        self._completions: list[Completion] = []

    def call(self, method: Callable[Concatenate[Rank, _P], None], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Have the process of the rank make this call, after all earlier ones."""
        assert not named
        self.child.send((method, arguments))

    def submit(self, plan: StepPlan) -> None:
        self.call(Rank.submit, plan)

    def take_completions(self) -> list[Completion]:
        """Raises what `receive` raises."""
        self.receive()
        taken, self._completions = self._completions, []
        return taken

    def wait_completions(self, timeout: float) -> bool:
        """The driver waits for all ranks at once: `RemoteRanks.wait`."""
        raise NotImplementedError

    def receive(self) -> None:
        """Take what the rank has sent. Raises its error if it has failed, and `ProcessEndedError` if it has ended."""
        try:
            news: list[RankNews] = self.child.receive()
        except EOFError:
            raise ProcessEndedError(f"the process of rank {self.rank} ended: {self.child.describe_end()}") from None
        for self.boot_id, self.usable_slots, completions, found in news:
            self._completions += completions
            if found is not None:
                self.found.append(found)


class RemoteRanks:
    """All ranks of an engine, and their KV caches (a `KVCache`). A context manager that ends them."""

    def __init__(self, num_ranks: int, engine: str, socket: Path, layout: KVLayout) -> None:
        self.workers: list[RemoteRank] = []
        self._num_checks = 0
        """That some rank has not answered."""
        try:
            for rank in range(num_ranks):
                self.workers.append(RemoteRank(RankSpec(rank, engine, socket, layout)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Those that do not end in time are killed."""
        for worker in self.workers:
            worker.child.pipe.close()  # of all, before the first is waited for
        for worker in self.workers:
            worker.child.join()

    @property
    def are_ready(self) -> bool:
        """Whether all ranks have their KV caches."""
        return all(worker.boot_id for worker in self.workers)

    @property
    def usable_slots(self) -> int:
        """Slots that all ranks can copy to and from."""
        return min(worker.usable_slots for worker in self.workers)

    def join(self, ticket: SessionTicket | None) -> None:
        """All ranks join this session of the engine."""
        for worker in self.workers:
            worker.call(Rank.join, ticket)

    def wait(self, seconds: float, fd: int) -> None:
        """Wait until a rank has sent something or `fd`, unless it is -1, can be read."""
        pipes = [worker.child.pipe for worker in self.workers]
        wait_for_pipes([*pipes, fd] if fd >= 0 else pipes, seconds)

    def receive(self) -> None:
        """Raises what `RemoteRank.receive` raises."""
        for worker in self.workers:
            worker.receive()

    # -- the KV caches --------------------------------------------------------------------------------------

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        if keys:
            for worker in self.workers:
                worker.call(Rank.write, keys, blocks)

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._num_checks += 1
        for worker in self.workers:
            worker.call(Rank.check, keys, blocks)

    def scrub(self, blocks: Sequence[int]) -> None:
        if blocks:
            for worker in self.workers:
                worker.call(Rank.scrub, blocks)

    def take_verifications(self) -> list[Verification]:
        complete = min(len(worker.found) for worker in self.workers)
        self._num_checks -= complete
        return [Verification.of_ranks([worker.found.popleft() for worker in self.workers]) for _ in range(complete)]

    @property
    def is_verifying(self) -> bool:
        return self._num_checks > 0
