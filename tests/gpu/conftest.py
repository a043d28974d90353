"""What the GPU tests share. `sanitize.sh` beside this runs them under compute-sanitizer."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.doubles.fakes import Polled

from kvstow.config import PoolConfig
from kvstow.devices.base import Ticket, TicketState
from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.copier import pointers_to_fields
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool

Bytes = npt.NDArray[np.uint8]

_PATIENCE = 30.0  # seconds
_new_stream: Any = torch.cuda.Stream  # untyped in torch
_LATCH = r"""
extern "C" __global__ void latch(volatile int* gate, unsigned long long timeout)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > timeout) {
            gate[1] = 1;
            return;
        }
        __nanosleep(1000);
    } while (gate[0] == 0);
}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker("gpu")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class _LatchArguments(ctypes.Structure):
    _fields_ = [("gate", ctypes.c_uint64), ("timeout", ctypes.c_uint64)]  # nanoseconds


class GpuLatch:
    """A kernel that holds `stream` until `open`, or for ten seconds, which fails the test: it cannot hang the GPU."""

    def __init__(self, undo: ExitStack) -> None:
        self.stream: torch.cuda.Stream = _new_stream()
        self._context = primary_context(0)
        driver = self._context.driver
        with self._context.current():
            module = driver.load_module(driver.compile(_LATCH, driver.compute_capability(0)))
            self._function = driver.get_function(module, "latch")
            address = driver.allocate_host(8)
        self._gate = (ctypes.c_int32 * 2).from_address(address)
        self._arguments = _LatchArguments(address, 10**10)
        self._pointers = pointers_to_fields(self._arguments)
        undo.callback(self._give_back, module, address)

    def close(self) -> None:
        """What the stream is given from now on waits for `open`."""
        self._gate[0] = self._gate[1] = 0
        with self._context.current():
            arguments = ctypes.addressof(self._pointers)
            self._context.driver.launch(self._function, (1, 1), 1, self.stream.cuda_stream, arguments)

    def open(self) -> None:
        assert not self._gate[1], "the latch has opened by itself"
        self._gate[0] = 1

    def _give_back(self, module: Any, address: int) -> None:
        self._gate[0] = 1
        torch.cuda.synchronize()
        with self._context.current():
            self._context.driver.free_host(address)
            self._context.driver.unload_module(module)


class GpuRank:
    """A KV cache with gaps between its rows, filled with random bytes, and a device over a pinned pool."""

    def __init__(
        self,
        undo: ExitStack,
        pages: Sequence[int],
        gaps: Sequence[int] = (),
        *,
        blocks: int,
        slots: int,
        chunk_bytes: int = 64 << 10,
        **options: Any,
    ) -> None:
        sizes = [page + gap for page, gap in zip(pages, gaps or [0] * len(pages), strict=True)]
        self.storage = [torch.empty((blocks, size), dtype=torch.uint8, device="cuda") for size in sizes]
        self.tensors = [memory[:, :page] for memory, page in zip(self.storage, pages, strict=True)]
        self.scramble()
        self.num_blocks, self.num_slots = blocks, slots
        self.layout = KVLayout(
            tuple(Region(f"{i}", blocks, page, size) for i, (page, size) in enumerate(zip(pages, sizes, strict=True)))
        )
        slot_bytes = self.layout.slot_bytes
        self.registrar = CudaRegistrar()
        config = PoolConfig(slot_bytes, slot_bytes * slots, chunk_bytes=chunk_bytes, pause=0.0)
        self.pool = HostPool(config, self.registrar)
        undo.callback(self.pool.close)
        self.options = CudaOptions(**options)
        self.device = self.new_device()
        undo.callback(lambda: self.device.close())
        self.pool.start()
        self._wait_pinned()
        self._ids = iter(range(1 << 40))

    def new_device(self) -> CudaDevice:
        return CudaDevice(
            self.pool,
            self.layout,
            self.tensors,
            registrar=self.registrar,
            options=self.options,
            parts=self.layout.parts,
        )

    def scramble(self) -> None:
        for memory in self.storage:
            memory.random_(0, 256)
        torch.cuda.synchronize()

    def blocks(self, blocks: Sequence[int]) -> Bytes:
        """The contents of blocks, laid out as in a slot. Waits for the GPU."""
        index = torch.tensor(list(blocks), device="cuda")
        return torch.cat([tensor[index] for tensor in self.tensors], dim=1).cpu().numpy()

    def slots(self, slots: Sequence[int]) -> Bytes:
        size, stride = self.pool.slot_bytes, self.pool.slot_stride
        texts = [ctypes.string_at(self.pool.address + slot * stride, size) for slot in slots]
        return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), size)

    def store(self, blocks: Sequence[int], slots: Sequence[int], after: Any = None) -> Ticket:
        return self._looked_at(self.device.launch_store(next(self._ids), blocks, slots, after))

    def load(self, slots: Sequence[int], blocks: Sequence[int], after: Any = None) -> Ticket:
        return self._looked_at(self.device.launch_load(next(self._ids), blocks, slots, after))

    def _looked_at(self, ticket: Ticket) -> Ticket:
        self.device.advance()
        return Polled(self.device, ticket)

    def _wait_pinned(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.pool.pinned_slots < self.num_slots:
            assert time.monotonic() < deadline, self.pool.status()
            threading.Event().wait(0.001)


def wait(ticket: Ticket) -> TicketState:
    """Poll to the end. A failure that the test does not expect shows its error."""
    deadline = time.monotonic() + _PATIENCE
    while (state := ticket.poll()) not in (TicketState.DONE, TicketState.FAILED):
        assert time.monotonic() < deadline, "the copy does not end"
    return state


def succeed(ticket: Ticket) -> None:
    state = wait(ticket)
    assert state is TicketState.DONE, ticket.error


@pytest.fixture
def check_torch() -> Iterator[Callable[[], None]]:
    """Says whether torch works, and does so after the test, too."""

    def check() -> None:
        assert torch.arange(1000, device="cuda").sum().item() == 499_500
        torch.cuda.synchronize()

    yield check
    check()


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_rank(undo: ExitStack) -> Callable[..., GpuRank]:
    def make(pages: Sequence[int] = (4096, 1000), **options: Any) -> GpuRank:
        return GpuRank(undo, pages, **({"blocks": 16, "slots": 16} | options))

    return make


@pytest.fixture
def make_closed_rank() -> Callable[..., Any]:
    """A context manager around a rank, for tests that need many one after the other."""
    return GpuRankScope


class GpuRankScope:
    def __init__(self, pages: Sequence[int], gaps: Sequence[int] = (), **options: Any) -> None:
        self._arguments, self._options = (pages, gaps), options
        self._undo = ExitStack()

    def __enter__(self) -> GpuRank:
        return GpuRank(self._undo, *self._arguments, **self._options)

    def __exit__(self, *error: object) -> None:
        self._undo.close()


@pytest.fixture
def latch(undo: ExitStack) -> GpuLatch:
    return GpuLatch(undo)


@pytest.fixture
def finish() -> Callable[[Ticket], TicketState]:
    return wait


@pytest.fixture
def check_done() -> Callable[[Ticket], None]:
    return succeed
