"""Divides the time of a hit at events that KVStow's connector sees, embedded or attached, in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

from kvstow.copythread import CopyThread
from kvstow_service.connectors.engine_core.connector import OffloadConnector
from kvstow_service.connectors.engine_core.workerside import WorkerSide


@dataclass(frozen=True, slots=True)
class Split:
    """Milliseconds, as medians over single hits. `seen` lasts until the connector learns of the request, `given` until
    its load is given to the link, `loaded` until the load has ended, `begun` until the step that computes begins, and
    `answered` until the token is there. `beside` is the time of seen, given and begun that is neither copy nor compute.

    `steps` is how many steps the scheduler planned, on average, until the load was given. It is 1 if the first step
    gave it."""

    seen: float
    given: float
    loaded: float
    begun: float
    answered: float
    beside: float
    steps: float
    hits: int


class _Moments(NamedTuple):
    asked: float
    seen: float
    given: float
    loaded: float
    begun: float
    answered: float


class HitLog:
    """The events of one request at a time. Call `begin` before the request is sent, and `end` when it is answered."""

    def __init__(self) -> None:
        self._hits: list[_Moments] = []
        self._steps: list[int] = []
        self._planned = 0
        self._ops = set[int]()
        self._moments: dict[str, float] = {}

    def begin(self) -> None:
        self._ops, self._moments, self._planned = set(), {"asked": time.perf_counter()}, 0

    def end(self) -> None:
        """End the request. Requests that loaded nothing are left out."""
        self.note("answered")
        if len(self._moments) == len(_Moments._fields):
            self._hits.append(_Moments(**self._moments))
            self._steps.append(self._planned)
        self._moments = {}

    def split(self) -> Split | None:
        if not self._hits:
            return None
        names = [one.name for one in fields(Split)][: len(_Moments._fields) - 1]
        parts = [[(end - begin) * 1e3 for begin, end in pairwise(hit)] for hit in self._hits]
        medians = dict(zip(names, map(statistics.median, zip(*parts, strict=True)), strict=True))
        beside = statistics.median(seen + given + begun for seen, given, _, begun, _ in parts)
        return Split(**medians, beside=beside, steps=statistics.mean(self._steps), hits=len(self._hits))

    # -- called by what is observed -------------------------------------------------------------------------

    def note(self, name: str) -> None:
        if self._moments:
            self._moments.setdefault(name, time.perf_counter())

    def plan(self) -> None:
        """Note that the scheduler has planned a step."""
        self._planned += "seen" in self._moments and "given" not in self._moments

    def expect(self, ops: Sequence[Any]) -> None:
        self._ops |= {op.op_id for op in ops}

    def publish(self, completions: Sequence[Any]) -> None:
        done = self._ops & {one.op_id for one in completions if one.mark == "done"}
        self._ops -= done
        if done and not self._ops:
            self.note("loaded")


@contextmanager
def observe_hits() -> Iterator[HitLog]:
    """Let the connectors of this process report events to the log that this yields."""
    log = HitLog()

    def on_new_request(call: Callable[..., Any], self: Any, request: Any) -> Any:
        log.note("seen")
        return call(self, request)

    def build_connector_meta(call: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            log.note("begun")
        log.plan()
        return call(self, scheduler_output)

    def begin_step(call: Callable[..., Any], self: Any, step: Any) -> Any:
        log.expect(step.loads.ops)
        call(self, step)
        if step.loads.ops:
            log.note("given")

    def publish(call: Callable[..., Any], self: Any, completions: Any) -> Any:
        log.publish(completions)
        return call(self, completions)

    observed = [
        (OffloadConnector, "on_new_request", on_new_request),
        (OffloadConnector, "build_connector_meta", build_connector_meta),
        (WorkerSide, "begin_step", begin_step),
        (CopyThread, "_publish", publish),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in observed]
    for owner, name, observer in observed:
        setattr(owner, name, _around(getattr(owner, name), observer))
    try:
        yield log
    finally:
        for owner, name, method in saved:
            setattr(owner, name, method)


def _around(method: Callable[..., Any], observer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any) -> Any:
        return observer(method, *args)

    return called
