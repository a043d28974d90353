"""Captures CUDA graphs while a pool grows and shrinks beside them; a process of its own, as a broken capture can spoil
torch for what comes after it. Prints what happened as JSON.

    python capture_beside_pinning.py relaxed|default CAPTURES
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvstow.config import PoolConfig
from kvstow.devices.cuda.context import CudaContext, CudaRegistrar, primary_context
from kvstow.memory.hostpool import HostPool

_SLOT_BYTES, _SLOTS = 1 << 20, 256
_KERNELS = 100


class DefaultModeContext(CudaContext):
    """Leaves the thread in the capture mode in which every thread starts."""

    def settle(self) -> None:
        self.driver.push_context(self._handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        self.driver.push_context(self._handle)
        try:
            yield
        finally:
            self.driver.pop_context()


class CountingRegistrar(CudaRegistrar):
    calls = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.calls += 1
        super().register(address, num_bytes)


def capture_once() -> str | None:
    """Capture a graph and run it; the error, if that fails."""
    try:
        graph, counts = torch.cuda.CUDAGraph(), torch.zeros(1024, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(_KERNELS):
                counts.add_(1)
        counts.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert counts[0].item() == _KERNELS
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def main(mode: str, captures: int) -> None:
    torch.zeros(1, device="cuda")
    context = primary_context(0)
    registrar = CountingRegistrar(context=context if mode == "relaxed" else DefaultModeContext(context.driver, 0))
    pool = HostPool(PoolConfig(_SLOT_BYTES, _SLOT_BYTES * _SLOTS, chunk_bytes=_SLOT_BYTES, pause=0.001), registrar)
    pool.start()
    done, error = 0, None
    while done < captures and error is None and pool.status().error is None:
        error = capture_once()
        done += error is None
        if pool.status().state == "ready":  # so that registering never ends before the captures do
            pool.set_target(_SLOTS if pool.status().target_slots == 1 else 1)
    print(json.dumps([done, error, registrar.calls, pool.status().error]))
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
