"""A stand-in for a decode step on the GPU, which measures how long its steps take beside other work."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

_KERNELS = 40


@dataclass(frozen=True, slots=True)
class Latencies:
    """The times of `steps` steps, in milliseconds."""

    steps: int
    p50: float
    p99: float
    p999: float
    longest: float


@dataclass(slots=True)
class DecodeLoop:
    """A thread that launches 40 small kernels, copies 4 bytes back and waits for them, again and again.

    It is a context manager, inside which the thread runs. `seconds` are those of the steps that ended after `reset`.
    """

    seconds: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> DecodeLoop:
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()
        time.sleep(0.3)  # because the first steps load kernels
        self.reset()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def reset(self) -> None:
        self.seconds = []

    def take(self) -> list[float]:
        """Return the steps since `reset`, including the one in progress, which may be the slow one."""
        seen, seconds = len(self.seconds), self.seconds
        while len(seconds) == seen:
            time.sleep(0.0005)
        return seconds[: seen + 1]

    def _run(self) -> None:
        torch.cuda.set_device(0)
        values, token = torch.zeros(4096, device="cuda"), torch.zeros(1, pin_memory=True)
        while not self._stop.is_set():
            started = time.perf_counter()
            for _ in range(_KERNELS):
                values.add_(1)
            token.copy_(values[:1], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            self.seconds.append(time.perf_counter() - started)


def summarize(seconds: list[float]) -> Latencies:
    values = np.array(seconds) * 1e3
    p50, p99, p999 = (float(value) for value in np.percentile(values, [50, 99, 99.9]))
    return Latencies(len(seconds), p50, p99, p999, float(values.max()))
