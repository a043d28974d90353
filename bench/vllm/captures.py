"""What KVStow's pool registered while vLLM captured its CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


@dataclass(frozen=True, slots=True)
class Captures:
    """The captures of one start, which did not fail. `seconds` are those of all captures together. The calls are those
    of `cuMemHostRegister`: how many were at least partly during captures, and how many there were in all."""

    seconds: float
    calls: int
    gib: float
    calls_in_all: int


@dataclass(slots=True)
class _Log:
    captures: list[tuple[float, float]] = field(default_factory=list)
    calls: list[tuple[float, float, int]] = field(default_factory=list)

    def summary(self) -> Captures:
        beside = [
            num_bytes
            for began, ended, num_bytes in list(self.calls)
            if any(began < capture_ended and ended > capture_began for capture_began, capture_ended in self.captures)
        ]
        seconds = sum(ended - began for began, ended in self.captures)
        return Captures(seconds, len(beside), sum(beside) / (1 << 30), len(self.calls))


@contextmanager
def observe_captures() -> Iterator[Callable[[], Captures]]:
    """Record the captures and registrations of this process. Yields a function that returns a summary so far."""
    log, registrar = _Log(), import_module("kvstow.devices.cuda").CudaRegistrar
    runners = [import_module(name).GPUModelRunner for name in _RUNNERS]
    saved = [(owner, "capture_model", owner.capture_model) for owner in runners]
    saved.append((registrar, "register", registrar.register))
    for runner in runners:
        runner.capture_model = _timed(runner.capture_model, log.captures)
    registrar.register = _noted(registrar.register, log.calls)
    try:
        yield log.summary
    finally:
        for owner, name, method in saved:
            setattr(owner, name, method)


def _timed(method: Callable[..., Any], into: list[tuple[float, float]]) -> Callable[..., Any]:
    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            into.append((began, time.perf_counter()))

    return timed


def _noted(register: Callable[..., None], into: list[tuple[float, float, int]]) -> Callable[..., None]:
    @wraps(register)
    def noted(self: object, address: int, num_bytes: int) -> None:
        began = time.perf_counter()
        register(self, address, num_bytes)
        into.append((began, time.perf_counter(), num_bytes))

    return noted
