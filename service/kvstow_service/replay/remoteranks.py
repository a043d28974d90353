"""The ranks of an engine in processes of their own, as the engine sees them, and what the two send each other.

A process that a replay starts runs a module of this package and talks to its parent over a pipe. It gets what it needs
as its first message. It ends when its parent does, because the pipe ends then. A terminal's Ctrl-C reaches the first
process alone, which tells the others.

A rank does what it is told in the order in which it is told: what a step computes is written before the step's stores
read it, and what a load has brought is checked before its blocks are overwritten.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from kvstow.attach.hello import SessionTicket
from kvstow.errors import KvstowError, ProcessEndedError
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow.messages import Completion, Op, StepPlan
from kvstow_service.replay.kv import Verification

_LAST_WORDS_SECONDS = 10.0


class Child:
    """A child process, which this object owns. One thread uses it; `pipe` carries pickled messages both ways."""

    def __init__(self, module: str, message: object, log: IO[bytes] | None = None) -> None:
        """Run `module` as a program; `message` is its first. It writes to `log`, or to the standard error of this
        process."""
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, also from a bare checkout
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
            )
        self.pipe: Connection[Any, Any] = Connection(ours.detach())
        self.send(message)

    def send(self, message: object) -> None:
        """A child that has ended hears nothing; that it has ended shows where its messages are received."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> list[Any]:
        """The messages that are there. Raises `EOFError` once the child has ended and all are taken."""
        found = []
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, ConnectionError):
            if not found:
                raise EOFError(f"process {self.process.pid} has ended") from None
        return found

    def describe_end(self) -> str:
        """How the process has ended, after `receive` has raised: "exit status 1", "signal SIGKILL"."""
        status = self.join()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def join(self, seconds: float = _LAST_WORDS_SECONDS) -> int:
        """Close the pipe, which ends the child, and return its exit status; kills one that does not end in time."""
        self.pipe.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def parent_pipe() -> Connection[Any, Any]:
    """In a child: the pipe to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Connection(int(sys.argv[1]))


RANK_MODULE = "kvstow_service.replay.rankprocess"


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs: the first message to it. `socket`: of the node service."""

    rank: int
    engine: str
    socket: Path
    layout: KVLayout


class Join(NamedTuple):
    """Join this session of the engine; None: there is none at the moment."""

    ticket: SessionTicket | None


class Write(NamedTuple):
    keys: Sequence[BlockKey]
    blocks: Sequence[int]


class CheckRank(NamedTuple):
    keys: Sequence[BlockKey]
    blocks: Sequence[int]


class Scrub(NamedTuple):
    blocks: Sequence[int]


class Submit(NamedTuple):
    ops: tuple[Op, ...]


class StopRank(NamedTuple):
    """Let go of the memory and end."""


class Ready(NamedTuple):
    """The rank has its KV cache."""


class Usable(NamedTuple):
    """So many slots can be copied to and from."""

    slots: int


class Completed(NamedTuple):
    boot_id: str
    completions: list[Completion]


class Checked(NamedTuple):
    found: Verification


class Failed(NamedTuple):
    """The process cannot do its work, and ends."""

    error: KvstowError


class RemoteRank:
    """One rank: a `RankWorker`."""

    def __init__(self, child: Child, rank: int) -> None:
        self.child = child
        self.rank = rank
        self.boot_id = ""
        """Of the completions that were taken last."""
        self.is_ready = False
        self.usable_slots = 0
        self.checks_under_way = 0
        self._completions: list[Completion] = []
        self._verifications: list[Verification] = []

    def submit(self, plan: StepPlan) -> None:
        self.child.send(Submit(plan.ops))

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self.checks_under_way += 1
        self.child.send(CheckRank(keys, blocks))

    def take_completions(self) -> list[Completion]:
        """Raises what `receive` raises."""
        self.receive()
        taken, self._completions = self._completions, []
        return taken

    def take_verifications(self) -> list[Verification]:
        taken, self._verifications = self._verifications, []
        return taken

    def wait_completions(self, timeout: float) -> bool:
        """The driver waits for all ranks at once: `RemoteRanks.wait`."""
        raise NotImplementedError

    def receive(self) -> None:
        """Take what the rank has said. Raises its error if it has failed, and `ProcessEndedError` if it has ended."""
        try:
            for message in self.child.receive():
                self._take(message)
        except EOFError:
            raise ProcessEndedError(f"the process of rank {self.rank} ended: {self.child.describe_end()}") from None

    def _take(self, message: object) -> None:
        match message:
            case Ready():
                self.is_ready = True
            case Usable(slots):
                self.usable_slots = slots
            case Completed(boot_id, completions):
                self.boot_id = boot_id
                self._completions += completions
            case Checked(found):
                self.checks_under_way -= 1
                self._verifications.append(found)
            case Failed(error):
                raise error


class RemoteRanks:
    """All ranks of an engine, and their KV caches (a `KVCache`). A context manager that ends them."""

    def __init__(self, num_ranks: int, engine: str, socket: Path, layout: KVLayout) -> None:
        self.workers: list[RemoteRank] = []
        self._found: list[deque[Verification]] = [deque() for _ in range(num_ranks)]
        """Of each rank, in the order of the checks: those that another rank has not ended yet."""
        try:
            for rank in range(num_ranks):
                child = Child(RANK_MODULE, RankSpec(rank, engine, socket, layout))
                self.workers.append(RemoteRank(child, rank))
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
            worker.child.send(StopRank())
        for worker in self.workers:
            worker.child.join()

    @property
    def are_ready(self) -> bool:
        return all(worker.is_ready for worker in self.workers)

    @property
    def usable_slots(self) -> int:
        """Slots that all ranks can copy to and from."""
        return min(worker.usable_slots for worker in self.workers)

    def join(self, ticket: SessionTicket | None) -> None:
        """All ranks join this session of the engine."""
        self._tell(Join(ticket))

    def wait(self, seconds: float, fd: int) -> None:
        """Wait until a rank has said something or `fd`, unless it is -1, can be read."""
        pipes = [worker.child.pipe for worker in self.workers]
        wait_for_pipes([*pipes, fd] if fd >= 0 else pipes, seconds)

    def receive(self) -> None:
        """Raises what `RemoteRank.receive` raises."""
        for worker in self.workers:
            worker.receive()

    # -- the KV caches --------------------------------------------------------------------------------------

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        if keys:
            self._tell(Write(keys, blocks))

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for worker in self.workers:
            worker.check(keys, blocks)

    def scrub(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._tell(Scrub(blocks))

    def take_verifications(self) -> list[Verification]:
        for rank, worker in enumerate(self.workers):
            self._found[rank].extend(worker.take_verifications())
        complete = min(map(len, self._found))
        return [Verification.of_ranks([found.popleft() for found in self._found]) for _ in range(complete)]

    @property
    def is_verifying(self) -> bool:
        return any(worker.checks_under_way for worker in self.workers) or any(self._found)

    def _tell(self, message: object) -> None:
        for worker in self.workers:
            worker.child.send(message)
