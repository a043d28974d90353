"""Each call of the CUDA driver fails once, at any point in the life of a rank: nothing hangs, reports a wrong result
or is left behind."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.devices.conftest import CudaRank, FakeCuda, FakeStream

from kvstow.dataplane import DataPlane
from kvstow.devices.cuda import CudaFence
from kvstow.devices.cuda.context import primary_context
from kvstow.errors import KvstowError
from kvstow.messages import Completion, Direction, Op, StepPlan

InstallCuda = Callable[[], FakeCuda]

_CALLS = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuDeviceGetAttribute",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemcpyHtoD",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
]
# Without one of these the driver does not take something back.
_TAKES_BACK = {"cuStreamDestroy", "cuEventDestroy", "cuMemFree", "cuModuleUnload", "cuMemHostUnregister"}
_TAKES_BACK |= {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"}
_FIRST = [*range(4), 6, 9, 13, 18, 24, 31]  # of the calls that are made again and again; the others in `make soak`
_OTHERS = [number for number in range(40) if number not in _FIRST]
_PATIENCE = 20.0  # seconds
_SLOTS = 8


class Host:
    """Does everything that a rank does: it is created, pinned, used with and without fences, driven, and closed."""

    def __init__(self, cuda: FakeCuda, undo: ExitStack) -> None:
        self.cuda, self._ids = cuda, count(1)
        options = {"strategy": "auto", "threshold_bytes": 2048, "staging_bytes": 11_000}  # two blocks a batch
        self.rank = CudaRank(undo, [4096, 1000], 24, 16, _SLOTS, options)
        undo.pop_all()
        self.plane = DataPlane(0, self.rank.pool, self.rank.device)
        self._compute = FakeStream(0)
        cuda.streams.append(self._compute)
        self.final: dict[int, Completion] = {}

    def pin(self) -> None:
        """Retries a chunk that fails, as an operator would."""
        deadline = time.monotonic() + _PATIENCE
        while (pinned := self.plane.report()).state != "ready":
            assert time.monotonic() < deadline, pinned
            if pinned.error is not None:
                self.rank.pool.retry()
            time.sleep(0.0005)

    def use(self) -> list[Op]:
        """Store every slot's block and load it elsewhere. The bytes of every op that is done must be right."""
        self.rank.scramble()
        contents = [self.rank.block(block) for block in range(_SLOTS)]
        stores = [self._op("store", range(3), range(3)), self._op("store", range(3, 8), range(3, 8))]
        self._submit(stores, self._fence())
        self._finish(stores)
        stored = [slot for op in stores if self._is_done(op) for slot in op.slots]
        assert [self.rank.slot(slot) for slot in stored] == [contents[slot] for slot in stored]
        loads = [self._op("load", range(8, 11), range(3)), self._op("load", range(11, 16), range(3, 8))]
        self._submit(loads, self._fence())
        self.plane.drive()
        self._finish(loads)
        loaded = [block for op in loads if self._is_done(op) for block in op.blocks if block - 8 in stored]
        assert [self.rank.block(block) for block in loaded] == [contents[block - 8] for block in loaded]
        return stores + loads

    def all_done(self, ops: list[Op]) -> bool:
        return all(self._is_done(op) for op in ops)

    def _op(self, direction: Direction, blocks: range, slots: range) -> Op:
        return Op(next(self._ids), direction, tuple(blocks), tuple(slots))

    def _fence(self) -> CudaFence | None:
        stream: Any = SimpleNamespace(device_index=0, cuda_stream=self._compute)
        try:
            return CudaFence.record(stream)
        except (KvstowError, MemoryError):
            return None  # the host's own call has failed

    def _submit(self, ops: list[Op], fence: CudaFence | None) -> None:
        self.plane.submit(StepPlan(tuple(ops)), fence)

    def _finish(self, ops: list[Op]) -> None:
        """Wait for the final completion of each op, which must come once."""
        deadline = time.monotonic() + _PATIENCE
        left = {op.op_id: op for op in ops}
        while left:
            assert time.monotonic() < deadline, (
                f"no final completion of {sorted(left)}; the rank is {self.plane.report()}"
            )
            self.cuda.run()
            self.plane.drive()
            self.plane.wait_completions(0.0005)
            for completion in self.plane.take_completions():
                if completion.mark != "source_free":
                    assert completion.op_id not in self.final, "completed twice"
                    self.final[completion.op_id] = completion
                    self._check_untouched(left.pop(completion.op_id))

    def _check_untouched(self, op: Op) -> None:
        pool = self.rank.pool
        for slot in op.slots:
            self.cuda.must_be_free(f"{op} is over", pool.address + slot * pool.slot_stride, pool.slot_bytes)
        for block in op.blocks:
            for tensor in self.rank.tensors:
                self.cuda.must_be_free(f"{op} is over", tensor[block].data_ptr(), tensor.shape[1])

    def _is_done(self, op: Op) -> bool:
        return self.final[op.op_id].mark == "done"


def _left(cuda: FakeCuda) -> list[str]:
    """Remaining resources, without the events that the context keeps for later fences."""
    cuda.failures.clear()
    context, idle, created = primary_context(0), set[Any](), cuda.calls.get("cuEventCreate", 0)
    while cuda.calls.get("cuEventCreate", 0) == created:  # the last one is new
        idle.add(context.take_event())
    for event in idle:
        context.give_back(event)
    return sorted(kind for handle, kind in cuda.live.items() if handle not in idle)


def _live_through(cuda: FakeCuda, call: str, number: int) -> None:
    with ExitStack() as undo:
        try:
            host = Host(cuda, undo)
        except (KvstowError, MemoryError):
            return  # the caller got the error
    try:
        host.pin()
        host.use()
        has_failed = cuda.calls.get(call, 0) > number
        ops = host.use()
        if host.plane.report().state != "failed":  # the report shows it, and the server stops using it
            assert host.all_done(ops) or not has_failed, host.final
    finally:
        host.plane.close()
    assert host.plane.report().pending_ops == 0


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(_FIRST, id="first"), pytest.param(_OTHERS, id="others", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("how", [700, MemoryError], ids=["refused", "raised"])
@pytest.mark.parametrize("call", _CALLS)
def test_a_call_that_fails_once_hangs_nothing_and_leaves_nothing(
    call: str,
    how: int | type[Exception],
    numbers: list[int],
    install_cuda: InstallCuda,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "kvstow.dataplane")  # its records' tracebacks would hold on to fences
    for number in numbers:
        cuda = install_cuda()
        cuda.failures[call] = (number, how)
        _live_through(cuda, call, number)
        has_failed = cuda.calls.get(call, 0) > number
        most = int(call in _TAKES_BACK and has_failed)  # what the driver did not take back
        if len(_left(cuda)) > most:
            gc.collect()  # tracebacks hold on to fences
        assert len(_left(cuda)) <= most, f"{call} number {number}: {_left(cuda)}"
        assert cuda.offences == [], f"{call} number {number}"
        if not has_failed:
            assert number > 0, "it is never called"
            return
