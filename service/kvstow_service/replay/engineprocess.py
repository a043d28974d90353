"""One engine of an attached replay: a process with the scheduler half; its ranks are processes of their own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstow_service.replay.driver import Position, ReplayDriver
from kvstow_service.replay.offload import AttachedOffload, pool_identity
from kvstow_service.replay.processes import Pipe
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.result import Tally
from kvstow_service.replay.trace import ReplayOptions, Shape, TraceRequest

_FIRST_SLOT_SECONDS = 10.0  # after that the replay begins without a pool, as an inference engine would
_ABSENT_SECONDS = 2.0  # the same while no service answers
_SETTLED_SECONDS = 0.15  # without more slots; a worker reports new ones to the service every 0.05 s
_GROWTH_SECONDS = 2.0  # with more and more slots
_PROGRESS_SECONDS = 0.1
_WAIT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine's process needs. `is_held`: it attaches at once, and starts no request before it gets `begin`."""

    name: str
    socket: Path
    shape: Shape
    num_ranks: int
    kv_blocks: int
    wanted_bytes: int
    requests: Sequence[TraceRequest]
    options: ReplayOptions
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this life of an engine is. `sessions`: how often it has attached; `problem`: why it is not attached now;
    `waits`: look-ups that the service has answered later, because its fleet tier might have more, or a rank was still
    registering what was found; `position` counts in the requests that it was given."""

    tally: Tally = field(default_factory=Tally)
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    slots: int = 0
    sessions: int = 0
    seconds_without: float = 0.0
    problem: str | None = None
    waits: int = 0
    is_last: bool = False


class ReplayEngine:
    """Replays on the main thread. Another one makes the calls of the parent, and ends the process if that goes."""

    def __init__(self, pipe: Pipe, spec: EngineSpec) -> None:
        self._pipe, self._spec = pipe, spec
        self._stop = threading.Event()
        self._may_begin = threading.Event()
        self._reported = 0.0

    def run(self) -> None:
        spec = self._spec
        threading.Thread(target=self._listen, name="kvstow-parent", daemon=True).start()
        layout = spec.shape.layout(spec.kv_blocks)
        with RemoteRanks(spec.num_ranks, spec.name, spec.socket, layout) as ranks:
            identity = pool_identity(spec.shape, spec.num_ranks)
            offload = AttachedOffload(spec.socket, spec.name, identity, ranks, wanted_bytes=spec.wanted_bytes)
            self._wait_for_ranks(ranks)
            if spec.is_held:
                self._wait_for_begin(offload, ranks)
            else:
                self._wait_for_slots(offload, ranks)
            driver = ReplayDriver(
                offload,
                ranks.workers,
                ranks,
                spec.requests,
                spec.options,
                kv_blocks=spec.kv_blocks,
                on_request=lambda finished: self._report_progress(driver, offload),
                wait=offload.wait,
            )
            self._started = time.monotonic()
            driver.run(self._stop)
            last = self._progress(driver, offload, is_last=True)
            logging.disable(logging.WARNING)  # the processes see each other leave
        offload.close()  # after the ranks, which release their memory by themselves
        self._pipe.send(last)

    def _wait_for_ranks(self, ranks: RemoteRanks) -> None:
        while not ranks.are_ready and not self._stop.is_set():
            ranks.receive()
            ranks.wait(_WAIT_SECONDS, -1)

    def _wait_for_begin(self, offload: AttachedOffload, ranks: RemoteRanks) -> None:
        while not self._may_begin.is_set() and not self._stop.is_set():
            offload.step()
            ranks.receive()
            offload.wait(_WAIT_SECONDS)

    def _wait_for_slots(self, offload: AttachedOffload, ranks: RemoteRanks) -> None:
        """Until the service lets this engine use slots, and for a moment their number has not grown: a replay is over
        while an inference engine would still load its weights. Not forever: see the constants above."""
        begun = changed = time.monotonic()
        slots = 0
        while not self._stop.is_set():
            offload.step()
            ranks.receive()
            now, before, slots = time.monotonic(), slots, min(ranks.usable_slots, offload.ask_room())
            if slots != before:
                begun, changed = begun if before else now, now
            if slots:
                patience = _GROWTH_SECONDS
            else:
                patience = _FIRST_SLOT_SECONDS if offload.engine.is_attached else _ABSENT_SECONDS
            if now > begun + patience or (slots and now > changed + _SETTLED_SECONDS):
                return
            offload.wait(_WAIT_SECONDS)

    def _report_progress(self, driver: ReplayDriver, offload: AttachedOffload) -> None:
        now = time.monotonic()
        if now >= self._reported + _PROGRESS_SECONDS:
            self._reported = now
            self._pipe.send(self._progress(driver, offload))

    def _progress(self, driver: ReplayDriver, offload: AttachedOffload, *, is_last: bool = False) -> Progress:
        engine = offload.engine
        return Progress(
            tally=driver.tally,
            position=driver.position,
            seconds=time.monotonic() - self._started,
            slots=offload.figures().slots,
            sessions=engine.num_sessions,
            seconds_without=offload.seconds_without,
            problem=engine.problem,
            waits=offload.waits,
            is_last=is_last,
        )

    def begin(self) -> None:
        """Start with the first request. For an engine that is held."""
        self._may_begin.set()

    def finish(self) -> None:
        """Start no request any more, and end when those in flight have."""
        self._stop.set()

    def _listen(self) -> None:
        try:
            while True:
                self._pipe.recv()(self)
        except (EOFError, OSError):
            os._exit(1)  # the parent has gone; the ranks end with this process


def run_engine(pipe: Pipe, spec: EngineSpec) -> None:
    ReplayEngine(pipe, spec).run()
