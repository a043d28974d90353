"""Engines of an attached replay: started, started again when they die, and summed up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from typing import Any, Self

from kvstow.errors import ProcessEndedError
from kvstow_service.replay.engineprocess import EngineSpec, Progress, ReplayEngine, run_engine
from kvstow_service.replay.offload import PoolCounts
from kvstow_service.replay.processes import Child
from kvstow_service.replay.result import ReplayResult, Tally

_WAIT_SECONDS = 0.05  # the longest that the loop is blind to a stop
_FUTILE_LIVES = 3  # in a row, without a request finished


@dataclass(frozen=True, slots=True)
class EngineLife:
    """One process of an engine. `first_blocks` and `first_hit_blocks`: of its first request. `end`: "finished", or how
    it died."""

    requests: int
    blocks: int
    hit_blocks: int
    first_blocks: int
    first_hit_blocks: int
    seconds: float
    end: str

    @classmethod
    def of(cls, progress: Progress, end: str) -> Self:
        one = progress.tally
        found = one.requests, one.blocks, one.hit_blocks, one.first_blocks, one.first_hit_blocks
        return cls(*found, progress.seconds, end)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What one engine found in all its lives. `sessions`: how often it attached; `seconds_without`: how long it was not
    attached while it ran; `problem`: why not, if it was not at the end; `waits`: look-ups that the service has answered
    later, because its fleet tier might have more, or a rank was still registering what was found."""

    name: str
    result: ReplayResult
    lives: tuple[EngineLife, ...]
    sessions: int
    seconds_without: float
    problem: str | None
    waits: int

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            **self.result.to_json(),
            "sessions": self.sessions,
            "restarts": len(self.lives) - 1,
            "seconds_without_service": self.seconds_without,
            "problem": self.problem,
            "waits": self.waits,
            "lives": [asdict(life) for life in self.lives],
        }


@dataclass(frozen=True, slots=True)
class AttachedResult:
    """`total` sums up the engines; its seconds are those of the wall clock."""

    total: ReplayResult
    engines: tuple[EngineResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every loaded byte was right."""
        return self.total.ok

    @property
    def waits(self) -> int:
        return sum(engine.waits for engine in self.engines)

    def to_json(self) -> dict[str, Any]:
        engines = [engine.to_json() for engine in self.engines]
        sums = {name: sum(engine[name] for engine in engines) for name in ("sessions", "restarts", "waits")}
        return {**self.total.to_json(), **sums, "engines": engines}


class EngineLauncher:
    """Runs engines until each has replayed its trace. One that dies is started again, and goes on with the requests
    that it had not finished. `on_request` gets the number of finished requests. One thread uses it.

    `may_begin`: whether the engine with this process id may start its first request; it is called again and again until
    it may, for each process of an engine. Without it, an engine decides by itself. `children_log`: where the processes
    write, if not to the standard error of this one."""

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
        """After `stop` no request starts, and what is in flight may finish. Raises the error of an engine that cannot
        work, and `ProcessEndedError` for one that dies again and again."""
        begun = time.monotonic()
        try:
            for engine in self._engines:
                engine.start()
            while running := [(engine, engine.child) for engine in self._engines if engine.child is not None]:
                if stop.is_set():
                    for engine, _ in running:
                        engine.finish()
                wait_for_pipes([child.pipe for _, child in running], _WAIT_SECONDS)
                for engine, child in running:
                    engine.receive(child)
                self._on_request(sum(engine.tally().requests for engine in self._engines))
                for engine, _ in running:
                    if engine.child is not None and engine.is_held and self._may_begin(engine.child.pid):
                        engine.begin(engine.child)
        finally:
            for engine in self._engines:
                if engine.child is not None:
                    engine.child.join(0.0)
        results = tuple(engine.result() for engine in self._engines)
        tally = Tally()
        for engine in self._engines:
            tally.add(engine.tally())
        slots = max(result.result.slots for result in results)
        seconds = time.monotonic() - begun
        return AttachedResult(tally.freeze(PoolCounts(slots), seconds=seconds, ranks=results[0].result.ranks), results)


class _Engine:
    """One engine, over all its lives."""

    def __init__(self, spec: EngineSpec, log: Callable[[str], None], children_log: Path | None) -> None:
        self._spec, self._log, self._children_log = spec, log, children_log
        self._waiting: Sequence[int] = range(len(spec.requests))
        """Numbers of the requests that the current life was given."""
        self._ended: list[tuple[Progress, str]] = []
        self._now = Progress()
        self._is_finishing = False
        self.is_held = False
        self.child: Child | None = None

    def start(self) -> None:
        requests = [self._spec.requests[number] for number in self._waiting]
        self._now, self.is_held = Progress(), self._spec.is_held
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
        now, how = self._now, child.describe_end()
        self.child = None
        self._ended.append((now, "finished" if now.is_last else how))
        self._now = Progress()
        if now.is_last or self._is_finishing:
            return
        numbers = [*now.position.in_flight, *range(now.position.next, len(self._waiting))]
        self._waiting = [self._waiting[number] for number in numbers]
        if len(self._ended) >= _FUTILE_LIVES and not any(
            life.tally.requests for life, _ in self._ended[-_FUTILE_LIVES:]
        ):
            raise ProcessEndedError(f"{self._spec.name} ended {_FUTILE_LIVES} times in a row at once: {how}")
        self._log(f"{self._spec.name} ended ({how}); it is started again with {len(self._waiting)} requests to go")
        self.start()

    def tally(self) -> Tally:
        """Of all lives."""
        total = Tally()
        for life in (*(life for life, _ in self._ended), self._now):
            total.add(life.tally)
        return total

    def result(self) -> EngineResult:
        lives = [life for life, _ in self._ended]
        seconds, slots = sum(life.seconds for life in lives), max((life.slots for life in lives), default=0)
        return EngineResult(
            self._spec.name,
            self.tally().freeze(PoolCounts(slots), seconds=seconds, ranks=self._spec.num_ranks),
            tuple(EngineLife.of(progress, end) for progress, end in self._ended),
            sum(life.sessions for life in lives),
            sum(life.seconds_without for life in lives),
            lives[-1].problem if lives else None,
            sum(life.waits for life in lives),
        )
