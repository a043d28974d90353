"""The ranks of an attached replay. Each is a process with a KV cache and an attached worker, and the engine's process
uses them through `RemoteRanks`.

A rank makes the engine's calls in their order. So the blocks that a step computes are written before its stores read
them, and loaded blocks are checked before they are overwritten.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec

from kvstow.attach.hello import SessionTicket
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ProcessEndedError
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly
from kvstow.messages import Completion, StepPlan
from kvstow_service.replay.kv import HostKV, Verification
from kvstow_service.replay.processes import Child, Pipe

_P = ParamSpec("_P")
_WAIT_SECONDS = 0.05  # how late a report without completions may be sent


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The parameters of a rank's process. `socket` is that of the node service."""

    rank: int
    engine: str
    socket: Path
    layout: KVLayout

    @property
    def name(self) -> str:
        return f"{self.engine}, rank {self.rank}"


class RankNews(NamedTuple):
    """A report of a rank. It sends one when it has its KV cache, and then whenever there is something new."""

    boot_id: str
    usable_slots: int
    completions: Sequence[Completion]
    found: Verification | None


class Rank:
    """A rank in its own process. Its main thread makes the engine's calls, and another thread reports completions."""

    def __init__(self, pipe: Pipe, spec: RankSpec, running: ExitStack) -> None:
        self._pipe, self._kv = pipe, HostKV.allocate(spec.rank, spec.layout)
        self._sending = threading.Lock()
        self._stop = threading.Event()
        # This process must not lock the memory, which it shares with the service. So it only populates it.
        self._pool = MappedPool(spec.layout.slot_bytes, PopulateOnly())
        running.callback(self._pool.close)
        device = CpuDevice(self._pool, spec.layout, self._kv.regions)
        running.callback(device.close)
        self._plane = DataPlane(spec.rank, self._pool, device)
        running.pop_all()  # the data plane owns the pool and the device now
        self._worker = AttachedWorker(spec.socket, self._plane, self._pool, engine=spec.engine)
        running.callback(self._worker.close)

    def run(self) -> None:
        """Make the engine's calls until it closes the pipe. That raises `EOFError` or `OSError`."""
        self._worker.start()
        self._send()
        reporter = threading.Thread(target=self._report, name="kvstow-report", daemon=True)
        reporter.start()
        try:
            while True:
                call, arguments = self._pipe.recv()
                call(self, *arguments)
        finally:
            logging.disable(logging.WARNING)  # the other ranks disconnect too, which needs no warning
            self._stop.set()
            reporter.join()

    def join(self, ticket: SessionTicket | None) -> None:
        """Join this session of the engine. None means that the engine has no session at the moment."""
        self._worker.join(ticket)

    def write(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._kv.write(keys, blocks)

    def submit(self, plan: StepPlan) -> None:
        self._worker.submit(plan)

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._send(found=self._kv.check(keys, blocks))

    def scrub(self, blocks: Sequence[int]) -> None:
        self._kv.scrub(blocks)

    def _report(self) -> None:
        usable = 0
        with suppress(OSError):  # if the engine's process has ended, the main thread ends this one
            while not self._stop.is_set():
                self._plane.wait_completions(_WAIT_SECONDS)
                completions = self._worker.take_completions()
                if completions or usable != self._pool.pinned_slots:
                    usable = self._pool.pinned_slots
                    self._send(completions)

    def _send(self, completions: Sequence[Completion] = (), found: Verification | None = None) -> None:
        with self._sending:
            self._pipe.send(RankNews(self._plane.boot_id, self._pool.pinned_slots, completions, found))


def run_rank(pipe: Pipe, spec: RankSpec) -> None:
    with ExitStack() as running, suppress(EOFError, OSError):
        Rank(pipe, spec, running).run()


# -- in the engine's process -------------------------------------------------------------------------------------------


class RemoteRank:
    """A rank, as the engine's process sees it."""

    def __init__(self, spec: RankSpec) -> None:
        self.child, self.rank = Child(run_rank, spec), spec.rank
        self.boot_id = ""
        """The boot id of the completions that were taken last. Empty until the rank has its KV cache."""
        self.usable_slots = 0
        self.found: deque[Verification] = deque()
        """The results of checks, in their order."""
        self._completions: list[Completion] = []

    def call(self, method: Callable[Concatenate[Rank, _P], None], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Have the rank's process make this call, after all earlier ones."""
        assert not named
        self.child.send((method, arguments))

    def submit(self, plan: StepPlan) -> None:
        self.call(Rank.submit, plan)

    def take_completions(self) -> list[Completion]:
        """Return new completions. Raises what `receive` raises."""
        self.receive()
        taken, self._completions = self._completions, []
        return taken

    def receive(self) -> None:
        """Take the rank's reports. Raises the rank's error if it has failed, and `ProcessEndedError` if it has
        ended."""
        try:
            news: list[RankNews] = self.child.receive()
        except EOFError:
            raise ProcessEndedError(f"the process of rank {self.rank} ended: {self.child.describe_end()}") from None
        for self.boot_id, self.usable_slots, completions, found in news:
            self._completions += completions
            if found is not None:
                self.found.append(found)


class RemoteRanks:
    """All ranks of an engine, with their KV caches. `close` ends the processes."""

    def __init__(self, num_ranks: int, engine: str, socket: Path, layout: KVLayout) -> None:
        self.workers: list[RemoteRank] = []
        self._num_checks = 0
        """How many checks some rank has not answered yet."""
        try:
            for rank in range(num_ranks):
                self.workers.append(RemoteRank(RankSpec(rank, engine, socket, layout)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, and kill those that do not end in time."""
        for worker in self.workers:
            worker.child.pipe.close()  # for all of them, so that they end at the same time
        for worker in self.workers:
            worker.child.join()

    @property
    def are_ready(self) -> bool:
        """Whether all ranks have their KV caches."""
        return all(worker.boot_id for worker in self.workers)

    @property
    def usable_slots(self) -> int:
        """How many slots all ranks can copy to and from."""
        return min(worker.usable_slots for worker in self.workers)

    def join(self, ticket: SessionTicket | None) -> None:
        """Have all ranks join this session of the engine, or leave it if `ticket` is None."""
        for worker in self.workers:
            worker.call(Rank.join, ticket)

    def wait(self, seconds: float, fd: int) -> None:
        """Wait until a rank has sent something, or until `fd` is readable, unless it is -1."""
        pipes = [worker.child.pipe for worker in self.workers]
        wait_for_pipes([*pipes, fd] if fd >= 0 else pipes, seconds)

    def receive(self) -> None:
        """Take the reports of all ranks. Raises what `RemoteRank.receive` raises."""
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
        """Return the results of new calls of `verify`, in their order. Each is that of all ranks together."""
        complete = min(len(worker.found) for worker in self.workers)
        self._num_checks -= complete
        return [Verification.of_ranks([worker.found.popleft() for worker in self.workers]) for _ in range(complete)]

    @property
    def is_verifying(self) -> bool:
        """Whether a result of `verify` is still missing."""
        return self._num_checks > 0
