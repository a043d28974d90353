"""The engines of an attached replay: the part that runs in the process of each engine, and the launcher. The launcher
starts engines, restarts those that die, and adds up their results. Each rank of an engine is a process, too."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path

from kvstow.errors import ProcessEndedError
from kvstow_service.replay.driver import ReplayDriver
from kvstow_service.replay.offload import AttachedOffload, pool_identity
from kvstow_service.replay.processes import Child, Pipe
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.result import AttachedResult, EngineLife, EngineResult
from kvstow_service.replay.trace import ReplayOptions, Shape, TraceRequest

_POLL_SECONDS = 0.05  # the time after which the loop looks again for a stop
_FUTILE_LIVES = 3  # an engine fails if this many lives in a row have finished no request
_FIRST_SLOT_SECONDS = 10.0  # how long to wait for a slot before the replay starts without one, as an engine would
_ABSENT_SECONDS = 2.0  # the same while no service answers
_SETTLED_SECONDS = 0.15  # slots have stopped growing after this time; workers report new ones every 0.05 s
_GROWTH_SECONDS = 2.0  # how long to wait while the number of slots grows
_PROGRESS_SECONDS = 0.1
"""The time between two reports of an engine to its parent."""
_WAIT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The parameters of an engine's process. With `is_held`, it attaches at once, but starts no request before
    `begin`."""

    name: str
    socket: Path
    shape: Shape
    num_ranks: int
    kv_blocks: int
    wanted_bytes: int
    requests: Sequence[TraceRequest]
    options: ReplayOptions
    is_held: bool = False


class ReplayEngine:
    """An engine in its own process. The main thread replays. Another thread makes the parent's calls, and ends the
    process if the parent ends."""

    def __init__(self, pipe: Pipe, spec: EngineSpec) -> None:
        self._pipe, self._spec = pipe, spec
        self._stop = threading.Event()
        self._may_begin = threading.Event()
        self._reported = 0.0

    def run(self) -> None:
        spec = self._spec
        threading.Thread(target=self._listen, name="kvstow-parent", daemon=True).start()
        layout = spec.shape.layout(spec.kv_blocks)
        with closing(RemoteRanks(spec.num_ranks, spec.name, spec.socket, layout)) as ranks:
            identity = pool_identity(spec.shape, spec.num_ranks)
            offload = AttachedOffload(spec.socket, spec.name, identity, ranks, wanted_bytes=spec.wanted_bytes)
            while not ranks.are_ready and not self._stop.is_set():
                ranks.receive()
                ranks.wait(_WAIT_SECONDS, -1)
            if spec.is_held:
                self._wait_for_begin(offload, ranks)
            else:
                self._wait_for_slots(offload, ranks)
            driver = ReplayDriver(
                offload,
                ranks,
                spec.requests,
                spec.options,
                kv_blocks=spec.kv_blocks,
                on_request=lambda finished: self._report_progress(driver, offload),
            )
            driver.run(self._stop)
            last = replace(self._progress(driver, offload), end="finished")
            logging.disable(logging.WARNING)  # the other processes disconnect too, which needs no warning
        offload.engine.close()  # after the ranks' processes, which release their memory
        self._pipe.send(last)

    def _wait_for_begin(self, offload: AttachedOffload, ranks: RemoteRanks) -> None:
        while not self._may_begin.is_set() and not self._stop.is_set():
            offload.step()
            ranks.receive()
            offload.wait(_WAIT_SECONDS)

    def _wait_for_slots(self, offload: AttachedOffload, ranks: RemoteRanks) -> None:
        """Wait until the service lets this engine use slots, and until their number has stopped growing for a moment.
        An inference engine has that time while it loads its weights, but a short replay would be over before. The wait
        is limited by the constants above."""
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

    def _progress(self, driver: ReplayDriver, offload: AttachedOffload) -> EngineLife:
        return EngineLife(
            result=driver.result(),
            position=driver.position,
            sessions=offload.engine.num_sessions,
            seconds_without=offload.seconds_without,
            problem=offload.engine.problem,
            waits=offload.waits,
        )

    def begin(self) -> None:
        """Start the first request. For an engine with `is_held`."""
        self._may_begin.set()

    def finish(self) -> None:
        """Start no more requests, and end when the running ones have ended."""
        self._stop.set()

    def _listen(self) -> None:
        try:
            while True:
                self._pipe.recv()(self)
        except (EOFError, OSError):
            os._exit(1)  # the parent has ended; the ranks end with this process


def run_engine(pipe: Pipe, spec: EngineSpec) -> None:
    ReplayEngine(pipe, spec).run()


# -- in the parent's process -------------------------------------------------------------------------------------------


class EngineLauncher:
    """Runs engines until each has replayed its trace. An engine that dies is restarted, and continues with the requests
    that it has not finished. `on_request` gets the number of finished requests. One thread uses the launcher.

    `may_begin` says whether the engine with this process id may start its first request. It is called again until it
    returns True, for each process of an engine. Without it, engines decide themselves. `children_log` is a file to
    which the processes write instead of the standard error of this one."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        on_request: Callable[[int], None] = lambda finished: None,
        log: Callable[[str], None] = lambda line: None,
        may_begin: Callable[[int], bool] | None = None,
        children_log: Path | None = None,
    ) -> None:
        self._engines = [_Engine(replace(spec, is_held=may_begin is not None), log, children_log) for spec in specs]
        self._on_request = on_request
        self._may_begin = may_begin or (lambda pid: True)

    def run(self, stop: threading.Event) -> AttachedResult:
        """Run the engines. After `stop`, no request starts, and running ones may finish. Raises the error of an engine
        that cannot work, and `ProcessEndedError` for one that dies again and again."""
        begun = time.monotonic()
        try:
            for engine in self._engines:
                engine.start()
            while running := [(engine, engine.child) for engine in self._engines if engine.child is not None]:
                if stop.is_set():
                    for engine, _ in running:
                        engine.finish()
                wait_for_pipes([child.pipe for _, child in running], _POLL_SECONDS)
                for engine, child in running:
                    engine.receive(child)
                self._on_request(sum(engine.finished for engine in self._engines))
                for engine, _ in running:
                    if engine.child is not None and engine.is_held and self._may_begin(engine.child.pid):
                        engine.begin(engine.child)
        finally:
            for engine in self._engines:
                if engine.child is not None:
                    engine.child.join(0.0)
        results = [EngineResult(engine.name, engine.ended) for engine in self._engines]
        return AttachedResult(results, time.monotonic() - begun)


class _Engine:
    """One engine, with all its lives."""

    def __init__(self, spec: EngineSpec, log: Callable[[str], None], children_log: Path | None) -> None:
        self._spec, self._log, self._children_log = spec, log, children_log
        self.name = spec.name
        self._waiting: Sequence[int] = range(len(spec.requests))
        """The numbers of the requests that the current life was given."""
        self.ended: list[EngineLife] = []
        self._now = EngineLife()
        self._is_finishing = False
        self.is_held = False
        self.child: Child | None = None

    def start(self) -> None:
        requests = [self._spec.requests[number] for number in self._waiting]
        self._now, self.is_held = EngineLife(), self._spec.is_held
        self.child = Child(run_engine, replace(self._spec, requests=requests), self._children_log)

    def begin(self, child: Child) -> None:
        self.is_held = False
        child.send(ReplayEngine.begin)

    def finish(self) -> None:
        if not self._is_finishing and self.child is not None:
            self._is_finishing = True
            self.child.send(ReplayEngine.finish)

    def receive(self, child: Child) -> None:
        try:
            for self._now in child.receive():
                pass
        except EOFError:
            self._end(child)

    def _end(self, child: Child) -> None:
        how = child.describe_end()
        now = self._now if self._now.end else replace(self._now, end=how)
        self.child, self._now = None, EngineLife()
        self.ended.append(now)
        if now.end == "finished" or self._is_finishing:
            return
        numbers = [*now.position.in_flight, *range(now.position.next, len(self._waiting))]
        self._waiting = [self._waiting[number] for number in numbers]
        if len(self.ended) >= _FUTILE_LIVES and not any(life.result.requests for life in self.ended[-_FUTILE_LIVES:]):
            raise ProcessEndedError(f"{self.name} ended {_FUTILE_LIVES} times in a row at once: {how}")
        self._log(f"{self.name} ended ({how}); it is started again with {len(self._waiting)} requests to go")
        self.start()

    @property
    def finished(self) -> int:
        """How many requests all lives have finished."""
        return sum(life.result.requests for life in (*self.ended, self._now))
