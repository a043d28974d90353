"""Engines of an attached replay: started, started again when they die, and summed up; and what the launcher and they
send each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvstow.errors import ProcessEndedError
from kvstow_service.replay.driver import Position
from kvstow_service.replay.offload import PoolCounts
from kvstow_service.replay.remoteranks import Child, Failed
from kvstow_service.replay.result import ReplayResult, Tally
from kvstow_service.replay.trace import ReplayOptions, Shape, TraceRequest

ENGINE_MODULE = "kvstow_service.replay.engineprocess"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine's process needs: the first message to it. `is_held`: it attaches at once, and starts no request
    before the launcher says `Begin`."""

    name: str
    socket: Path
    shape: Shape
    num_ranks: int
    kv_blocks: int
    wanted_bytes: int
    requests: Sequence[TraceRequest]
    options: ReplayOptions
    is_held: bool = False


class Begin(NamedTuple):
    """Start with the first request. For an engine whose `EngineSpec` says `is_held`."""


class Finish(NamedTuple):
    """Start no request any more, and end when those in flight have."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this life of an engine is. `sessions`: how often it has attached; `problem`: why it is not attached now;
    `waits`: look-ups that the service has answered later, as one with a fleet tier does;
    `position` counts in the requests that it was given."""

    tally: Tally
    position: Position
    seconds: float
    slots: int
    sessions: int
    seconds_without: float
    problem: str | None
    waits: int
    is_last: bool = False


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
    that it had not finished. `on_request` hears how many requests are finished. One thread uses it.

    `may_begin`: whether the engine with this process id may start its first request; it is asked again and again until
    it says so, for each process of an engine. Without it, an engine decides by itself. `children_log`: where the
    processes write, if not to the standard error of this one."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        on_request: Callable[[int], None] = lambda finished: None,
        log: Callable[[str], None] = lambda line: None,
        may_begin: Callable[[int], bool] | None = None,
        children_log: IO[bytes] | None = None,
    ) -> None:
        held = [replace(spec, is_held=may_begin is not None) for spec in specs]
        self._engines = [_Engine(spec, log, may_begin, children_log) for spec in held]
        self._on_request = on_request

    def run(self, stop: threading.Event) -> AttachedResult:
        """After `stop` no request starts, and what is in flight may finish. Raises the error of an engine that cannot
        work, and `ProcessEndedError` for one that dies again and again."""
        begun = time.monotonic()
        try:
            for engine in self._engines:
                engine.start()
            while running := [engine for engine in self._engines if engine.child is not None]:
                if stop.is_set():
                    for engine in running:
                        engine.finish()
                wait_for_pipes([engine.child.pipe for engine in running if engine.child], _WAIT_SECONDS)
                for engine in running:
                    engine.receive()
                self._on_request(sum(engine.tally().requests for engine in self._engines))
                for engine in running:
                    engine.begin_if_allowed()
        finally:
            for engine in self._engines:
                engine.close()
        return self._result(time.monotonic() - begun)

    def _result(self, seconds: float) -> AttachedResult:
        results = tuple(engine.result() for engine in self._engines)
        tally = Tally()
        for engine in self._engines:
            tally.add(engine.tally())
        slots = max(result.result.slots for result in results)
        total = tally.freeze(PoolCounts(slots), seconds=seconds, ranks=results[0].result.ranks)
        return AttachedResult(total, results)


class _Engine:
    """One engine, over all its lives."""

    def __init__(
        self,
        spec: EngineSpec,
        log: Callable[[str], None],
        may_begin: Callable[[int], bool] | None,
        children_log: IO[bytes] | None,
    ) -> None:
        self._spec, self._log = spec, log
        self._may_begin, self._children_log = may_begin, children_log
        self._is_held = False
        self._waiting: Sequence[int] = range(len(spec.requests))
        """Numbers of the requests that the current life was given."""
        self._ended: list[tuple[Progress | None, str]] = []
        self._now: Progress | None = None
        self._is_finishing = False
        self.child: Child | None = None

    def start(self) -> None:
        requests = [self._spec.requests[number] for number in self._waiting]
        self._now = None
        self.child = Child(ENGINE_MODULE, replace(self._spec, requests=requests), self._children_log)
        self._is_held = self._spec.is_held
        if self._is_finishing:
            self.child.send(Finish())

    def begin_if_allowed(self) -> None:
        if self._may_begin is None or self.child is None or not self._is_held:
            return
        if self._may_begin(self.child.process.pid):
            self._is_held = False
            self.child.send(Begin())

    def finish(self) -> None:
        if not self._is_finishing and self.child is not None:
            self._is_finishing = True
            self.child.send(Finish())

    def receive(self) -> None:
        assert self.child is not None
        try:
            for message in self.child.receive():
                if isinstance(message, Failed):
                    raise message.error
                self._now = message
        except EOFError:
            self._end()

    def close(self) -> None:
        if self.child is not None:
            self.child.join(0.0)
            self.child = None

    def _end(self) -> None:
        assert self.child is not None
        now, how = self._now, self.child.describe_end()
        self.child = None
        if now is not None and now.is_last:
            self._ended.append((now, "finished"))
            return
        self._ended.append((now, how))
        self._now = None
        if now is not None:
            position = now.position
            numbers = [*position.in_flight, *range(position.next, len(self._waiting))]
            self._waiting = [self._waiting[number] for number in numbers]
        if self._is_finishing:
            return
        futile = [life is None or not life.tally.requests for life, _ in self._ended[-_FUTILE_LIVES:]]
        if len(futile) == _FUTILE_LIVES and all(futile):
            raise ProcessEndedError(f"{self._spec.name} ended {_FUTILE_LIVES} times in a row at once: {how}")
        self._log(f"{self._spec.name} ended ({how}); it is started again with {len(self._waiting)} requests to go")
        self.start()

    def tally(self) -> Tally:
        """Of all lives."""
        total = Tally()
        for life, _ in self._ended:
            if life is not None:
                total.add(life.tally)
        if self._now is not None and self.child is not None:
            total.add(self._now.tally)
        return total

    def result(self) -> EngineResult:
        lives = [life for life, _ in self._ended if life is not None]
        slots = max((life.slots for life in lives), default=0)
        seconds = sum(life.seconds for life in lives)
        return EngineResult(
            self._spec.name,
            self.tally().freeze(PoolCounts(slots), seconds=seconds, ranks=self._spec.num_ranks),
            tuple(_life(progress, end) for progress, end in self._ended),
            sum(life.sessions for life in lives),
            sum(life.seconds_without for life in lives),
            lives[-1].problem if lives else None,
            sum(life.waits for life in lives),
        )


def _life(progress: Progress | None, end: str) -> EngineLife:
    if progress is None:
        return EngineLife(0, 0, 0, 0, 0, 0.0, end)
    tally = progress.tally
    return EngineLife(
        tally.requests,
        tally.blocks,
        tally.hit_blocks,
        tally.first_blocks,
        tally.first_hit_blocks,
        progress.seconds,
        end,
    )
