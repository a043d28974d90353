"""One rank of an attached replay: a process with a KV cache and an attached worker.

It makes the engine's calls in their order: what a step computes is written before the step's stores read it, and what a
load has brought is checked before its blocks are overwritten.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstow.attach.hello import SessionTicket
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly
from kvstow.messages import Completion, StepPlan
from kvstow_service.replay.kv import HostKV, Verification
from kvstow_service.replay.processes import Pipe

_WAIT_SECONDS = 0.05  # the longest that news other than completions take


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs. `socket`: of the node service."""

    rank: int
    engine: str
    socket: Path
    layout: KVLayout

    @property
    def name(self) -> str:
        return f"{self.engine}, rank {self.rank}"


class RankNews(NamedTuple):
    """A rank sends it once when it has its KV cache, and then whenever something is new."""

    boot_id: str
    usable_slots: int
    completions: Sequence[Completion]
    found: Verification | None


class Rank:
    """The engine calls it on the main thread. Another thread reports what is complete."""

    def __init__(self, pipe: Pipe, spec: RankSpec, running: ExitStack) -> None:
        self._pipe, self._kv = pipe, HostKV.allocate(spec.rank, spec.layout)
        self._sending = threading.Lock()
        self._stop = threading.Event()
        # The service's memory is shared: mlock has no business there.
        self._pool = MappedPool(spec.layout.slot_bytes, PopulateOnly())
        running.callback(self._pool.close)
        device = CpuDevice(self._pool, spec.layout, self._kv.regions)
        running.callback(device.close)
        self._plane = DataPlane(spec.rank, self._pool, device)
        running.pop_all()  # they are the data plane's
        self._worker = AttachedWorker(spec.socket, self._plane, self._pool, engine=spec.engine)
        running.callback(self._worker.close)

    def run(self) -> None:
        """Until the engine closes the pipe: then this raises `EOFError` or `OSError`."""
        self._worker.start()
        self._send()
        reporter = threading.Thread(target=self._report, name="kvstow-report", daemon=True)
        reporter.start()
        try:
            while True:
                call, arguments = self._pipe.recv()
                call(self, *arguments)
        finally:
            logging.disable(logging.WARNING)  # the other ranks leave, too
            self._stop.set()
            reporter.join()

    def join(self, ticket: SessionTicket | None) -> None:
        """Join this session of the engine; None: there is none at the moment."""
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
        with suppress(OSError):  # the engine has gone: the main thread sees it, too
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
