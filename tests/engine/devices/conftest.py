"""CUDA in host memory: streams that run when a test says so. The real thing is tested in tests/gpu."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.doubles.fakes import Polled
from tests.waiting import eventually

from kvstow.config import PoolConfig
from kvstow.devices.base import Ticket
from kvstow.devices.cuda import CudaDevice, CudaFence, CudaOptions, CudaRegistrar
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.driver import Driver
from kvstow.devices.cuda.layertrial import PLACE
from kvstow.devices.cuda.plan import PIECE
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool

_NOT_READY, _INVALID_VALUE = 600, 1
_ERRORS = {1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE"}


class FakeEvent:
    """Reached when all of its records have run."""

    def __init__(self) -> None:
        self.recorded = self.run = 0
        self.at = 0.0

    def is_reached(self, record: int) -> bool:
        return self.run >= record


class FakeStream:
    """A queue of work: its name, a function that says whether it was done, and the memory that it touches."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.work: deque[tuple[str, Callable[[], bool], list[tuple[int, int]]]] = deque()

    def __int__(self) -> int:
        return id(self)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.work if name not in ("wait", "record")]

    def step(self) -> bool:
        if self.work and self.work[0][1]():
            self.work.popleft()
            return True
        return False


class FakeCuda:
    """Stands in for `cuda.bindings.driver`. Nothing that was queued happens before `run`.

    `failures` maps a call to (which of them fails, counted from 0; its status, or what it raises), `refused` to
    the status with which all fail. `live` holds what was created and not destroyed. `offences`: memory that was taken
    away, or said to be free, while queued work was to touch it. `speeds`: bytes a second of copies ("copy") and of the
    kernel that reads host memory ("fetch"); without them, whatever is timed takes 2 ms.
    """

    CUstreamCaptureMode = CUdevice_attribute = CUresult = int

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.failures: dict[str, tuple[int, int | type[Exception]]] = {}
        self.refused: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.live: dict[Any, str] = {}
        self.offences: list[str] = []
        self.streams: list[FakeStream] = []
        self.speeds: dict[str, float] = {}
        self._now = 0.0
        self.contexts: list[Any] = []
        self.capture_mode = 0
        self._memory: dict[int, Any] = {}
        self._registered: dict[int, int] = {}
        self._running = threading.Lock()
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._batch_copy = ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(self._copy_batch)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._failing(name, value) if name.startswith("cu") and callable(value) else value

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            return (status,) if (status := self._count(name)) else call(*arguments)

        return counted

    def _count(self, name: str) -> int:
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        failing, status = self.failures.get(name, (-1, 0))
        if number != failing:
            return self.refused.get(name, 0)
        if isinstance(status, int):
            return status
        raise status("injected")

    def run(self, *streams: FakeStream) -> None:
        """Do all queued work (of `streams` only, if given) that waits for no outstanding event."""
        with self._running:
            while sum(stream.step() for stream in streams or self.streams):
                pass

    def must_be_free(self, what: str, start: int, size: int) -> None:
        """Note it if queued work touches this memory."""
        for stream in self.streams:
            for name, _, touched in tuple(stream.work):
                if any(first < start + size and start < first + length for first, length in touched):
                    self.offences.append(f"{what} while a {name} is to touch it")

    # Start, contexts.

    def cuInit(self, flags: int) -> Any:
        return (0,)

    def cuDriverGetVersion(self) -> Any:
        return 0, self.version

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> Any:
        return 0, ctypes.cast(self._batch_copy, ctypes.c_void_p).value, 0

    def cuGetErrorName(self, status: int) -> Any:
        return (0, _ERRORS[status].encode()) if status in _ERRORS else (_INVALID_VALUE, None)

    def cuGetErrorString(self, status: int) -> Any:
        return (0, b"the driver's text") if status in _ERRORS else (_INVALID_VALUE, None)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return 0, ordinal

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        return 0, {75: 9, 76: 0}[attribute]

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return 0, f"context of {device}"

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> Any:
        return 0, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        before, self.capture_mode = self.capture_mode, mode
        return 0, before

    # Streams, events.

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        self.streams.append(FakeStream(priority))
        return 0, self._created(self.streams[-1], "stream")

    def cuStreamDestroy(self, stream: Any) -> Any:
        return self._destroyed(stream)

    def cuStreamSynchronize(self, stream: Any) -> Any:
        if stream not in self.live:  # the real driver ends the process
            self.offences.append("a stream that was destroyed is waited for")
        self.run()
        assert not stream.work, "this would wait for ever"
        return (0,)

    def cuStreamQuery(self, stream: FakeStream) -> Any:
        return (_NOT_READY if stream.work else 0,)

    def cuStreamWaitEvent(self, stream: FakeStream, event: FakeEvent, flags: int) -> Any:
        record = event.recorded
        stream.work.append(("wait", lambda: event.is_reached(record), []))
        return (0,)

    def cuEventCreate(self, flags: int) -> Any:
        return 0, self._created(FakeEvent(), "event")

    def cuEventDestroy(self, event: Any) -> Any:
        return self._destroyed(event)

    def cuEventRecord(self, event: FakeEvent, stream: FakeStream) -> Any:
        event.recorded = record = event.recorded + 1

        def reach() -> bool:
            event.run, event.at = record, self._now
            return True

        stream.work.append(("record", reach, []))
        return (0,)

    def cuEventQuery(self, event: FakeEvent) -> Any:
        return (0 if event.is_reached(event.recorded) else _NOT_READY,)

    def cuEventElapsedTime(self, start: FakeEvent, end: FakeEvent) -> Any:
        assert start.run == start.recorded > 0 < end.recorded == end.run
        return 0, (end.at - start.at) * 1e3 if self.speeds else 2.0

    def _spend(self, kind: str, num_bytes: int) -> None:
        if self.speeds:
            self._now += num_bytes / self.speeds[kind]

    # Memory.

    def cuMemAlloc(self, num_bytes: int) -> Any:
        memory = np.full(num_bytes + 16, 0xEE, np.uint8)
        address = -(-memory.ctypes.data // 16) * 16
        self._memory[address] = memory
        return 0, self._created(address, "memory")

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> Any:
        return self.cuMemAlloc(num_bytes)

    def cuMemFree(self, address: int) -> Any:
        self.must_be_free("memory of the device is freed", address, len(self._memory.pop(address)) - 16)
        return self._destroyed(address)

    cuMemFreeHost = cuMemFree

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        self._created(("registered", address), "range")
        self._registered[address] = num_bytes
        return (0,)

    def cuMemHostUnregister(self, address: int) -> Any:
        self.must_be_free("memory of the host is unregistered", address, self._registered.pop(address, 0))
        return self._destroyed(("registered", address))

    def cuMemcpyHtoD(self, target: int, source: int, num_bytes: int) -> Any:
        ctypes.memmove(target, source, num_bytes)
        return (0,)

    def cuMemcpyAsync(self, target: int, source: int, num_bytes: int, stream: FakeStream) -> Any:
        self._queue_copy(target, source, num_bytes, stream)
        return (0,)

    def _queue_copy(self, target: int, source: int, num_bytes: int, stream: FakeStream) -> None:
        def move() -> bool:
            ctypes.memmove(target, source, num_bytes)
            self._spend("copy", num_bytes)
            return True

        stream.work.append(("copy", move, [(target, num_bytes), (source, num_bytes)]))

    def _copy_batch(self, targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
        try:
            status = self._count("cuMemcpyBatchAsync")
        except MemoryError:  # it is called through ctypes, and cannot raise
            status = 2
        if status:
            return status
        stream = next(stream for stream in self.streams if id(stream) == rest[-1])
        arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
        for copy in zip(*arrays, strict=True):
            target, source, size = copy
            self._queue_copy(target, source, size, stream)
        return 0

    # Kernels.

    def cuModuleLoadData(self, code: bytes) -> Any:
        return 0, self._created(object(), "module")

    def cuModuleUnload(self, module: Any) -> Any:
        return self._destroyed(module)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        return 0, name.decode()

    def cuLaunchKernel(self, function: str, pieces: int, blocks: int, *rest: Any) -> Any:
        if function == "fetch":
            return self._fetch(rest[5], (ctypes.c_uint64 * 4).from_address(rest[6]))
        stream, pointers = rest[5], (ctypes.c_uint64 * 4).from_address(rest[6])
        table, staging, block_bytes = (ctypes.c_uint64.from_address(pointer).value for pointer in pointers[:3])
        ids = list((ctypes.c_int32 * blocks).from_address(pointers[3]))

        rows = np.frombuffer(ctypes.string_at(table, pieces * PIECE.itemsize), PIECE).tolist()
        moves = [
            (staging + place * block_bytes + packed, page + block * stride, size)
            for page, stride, packed, size in rows
            for place, block in enumerate(ids)
        ]

        def move() -> bool:
            for packed, page, size in moves:
                ctypes.memmove(*((packed, page) if function == "gather" else (page, packed)), size)
            return True

        touched = [(start, size) for packed, page, size in moves for start in (packed, page)]
        stream.work.append((function, move, touched))
        return (0,)

    def _fetch(self, stream: FakeStream, pointers: Any) -> Any:
        table, places = (ctypes.c_uint64.from_address(pointer).value for pointer in pointers[:2])
        counts = [ctypes.c_uint32.from_address(pointer).value for pointer in pointers[2:]]
        rows = np.frombuffer(ctypes.string_at(table, counts[0] * PIECE.itemsize), PIECE).tolist()

        def move() -> bool:
            where = np.frombuffer(ctypes.string_at(places, counts[1] * PLACE.itemsize), PLACE).tolist()
            for page, stride, offset, size in rows:
                for slot, block in where:
                    ctypes.memmove(page + block * stride, slot + offset, size)
                    self._spend("fetch", size)
            return True

        touched = [(page, size) for page, _, _, size in rows] + [(places, counts[1] * PLACE.itemsize)]
        touched += [(slot, 1) for slot in self._registered]
        stream.work.append(("fetch", move, touched))
        return (0,)

    def _created(self, handle: Any, kind: str) -> Any:
        self.live[handle] = kind
        return handle

    def _destroyed(self, handle: Any) -> Any:
        return (0,) if self.live.pop(handle, None) else (_INVALID_VALUE,)


class FakeNvrtc:
    """Stands in for `cuda.bindings.nvrtc`; with a `log`, compiling fails."""

    def __init__(self, log: bytes = b"") -> None:
        self.log = log
        self.programs = 0

    def nvrtcCreateProgram(self, source: bytes, *rest: Any) -> Any:
        self.programs += 1
        return 0, source

    def nvrtcCompileProgram(self, program: Any, count: int, options: list[bytes]) -> Any:
        assert options == [b"--gpu-architecture=sm_90"]
        return (6 if self.log else 0,)

    def nvrtcGetCUBINSize(self, program: Any) -> Any:
        return 0, 4

    def nvrtcGetCUBIN(self, program: Any, code: bytes) -> Any:
        return (0,)

    def nvrtcGetProgramLogSize(self, program: Any) -> Any:
        return 0, len(self.log)

    def nvrtcGetProgramLog(self, program: Any, log: bytes) -> Any:
        ctypes.memmove(ctypes.c_char_p(log), self.log, len(self.log))
        return (0,)

    def nvrtcDestroyProgram(self, program: Any) -> Any:
        self.programs -= 1
        return (0,)


class FakeTensor:
    """A tensor in host memory that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.dtype, self.shape = memory, memory.dtype, memory.shape
        self.stride, self.data_ptr = memory.stride, memory.data_ptr


class CudaRank:
    """A KV cache of random bytes with gaps between its rows, and a CUDA device over a pool."""

    def __init__(
        self, undo: ExitStack, pages: Sequence[int], gap: int, blocks: int, slots: int, options: dict[str, Any]
    ) -> None:
        self.storage = [torch.empty((blocks, page + gap), dtype=torch.uint8) for page in pages]
        self.tensors = [memory[:, :page] for memory, page in zip(self.storage, pages, strict=True)]
        self.scramble()
        self.layout = KVLayout(tuple(Region(f"{i}", blocks, page, page + gap) for i, page in enumerate(pages)))
        self.registrar = CudaRegistrar()
        size = self.layout.slot_bytes
        self.pool = HostPool(PoolConfig(size, size * slots, chunk_bytes=16 << 10, pause=0.0), self.registrar)
        undo.callback(self.pool.close)
        self.parts = self.layout.parts if options.pop("layers", False) else None
        self.options = options
        self.device = self.new_device()
        undo.callback(self.device.close)
        self.pool.start()

    def new_device(self) -> CudaDevice:
        tensors: list[Any] = [FakeTensor(tensor) for tensor in self.tensors]
        options = CudaOptions(**self.options)
        return CudaDevice(self.pool, self.layout, tensors, registrar=self.registrar, options=options, parts=self.parts)

    def scramble(self) -> None:
        for memory in self.storage:
            memory.random_(0, 256)

    def block(self, block: int) -> bytes:
        return b"".join(tensor[block].numpy().tobytes() for tensor in self.tensors)

    def slot(self, slot: int) -> bytes:
        (address,) = self.pool.addresses(np.array([slot])).tolist()
        return ctypes.string_at(address, self.pool.slot_bytes)

    def store(self, blocks: Sequence[int], slots: Sequence[int], after: Any = None) -> Polled:
        return self._looked_at(self.device.launch_store(1, blocks, slots, after))

    def load(self, slots: Sequence[int], blocks: Sequence[int], after: Any = None) -> Polled:
        return self._looked_at(self.device.launch_load(2, blocks, slots, after))

    def _looked_at(self, ticket: Ticket) -> Polled:
        self.device.advance()
        return Polled(self.device, ticket)


@pytest.fixture
def new_cuda() -> Callable[..., FakeCuda]:
    return FakeCuda


@pytest.fixture
def new_nvrtc() -> Callable[..., FakeNvrtc]:
    return FakeNvrtc


@pytest.fixture
def install_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FakeCuda]]:
    """Makes a new `FakeCuda` the machine's GPU."""

    def install() -> FakeCuda:
        cuda = FakeCuda()
        driver = Driver(cuda, FakeNvrtc())
        monkeypatch.setattr("kvstow.devices.cuda.context.load_driver", lambda: driver)
        primary_context.cache_clear()
        return cuda

    yield install
    primary_context.cache_clear()


@pytest.fixture
def cuda(install_cuda: Callable[[], FakeCuda]) -> FakeCuda:
    """The machine's GPU is a `FakeCuda`."""
    return install_cuda()


@pytest.fixture
def make_cuda_rank(cuda: FakeCuda) -> Iterator[Callable[..., CudaRank]]:
    with ExitStack() as undo:

        def make(
            pages: Sequence[int] = (4096, 1000), gap: int = 24, blocks: int = 8, slots: int = 8, **options: Any
        ) -> CudaRank:
            rank = CudaRank(undo, pages, gap, blocks, slots, {"strategy": "staged"} | options)
            eventually(lambda: rank.pool.pinned_slots == slots)
            return rank

        yield make


@pytest.fixture
def new_fence(cuda: FakeCuda) -> Callable[[], tuple[CudaFence, FakeStream]]:
    """A fence after work that has not run, and the stream with that work."""

    def make() -> tuple[CudaFence, FakeStream]:
        _, stream = cuda.cuStreamCreateWithPriority(0, 0)
        torch_stream: Any = SimpleNamespace(device_index=0, cuda_stream=stream)
        return CudaFence.record(torch_stream), stream

    return make
