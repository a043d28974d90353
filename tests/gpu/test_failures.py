"""What fails in the driver fails one op, or the construction, and nothing else: torch goes on working."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.dataplane import DataPlane
from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaRegistrar, DriverError
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.plan import Split
from kvstow.errors import CopyError, PinError
from kvstow.memory.region import HostRegion
from kvstow.messages import Completion, Op, StepPlan

MakeRank = Callable[..., Any]
Finish = Callable[[Any], TicketState]

pytestmark = pytest.mark.usefixtures("check_torch")
strategies = pytest.mark.parametrize("strategy", ["staged", "direct"])


@pytest.fixture
def driver() -> Any:
    return primary_context(0).driver


def _fail_copy(driver: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the real driver refuse the copy `number`, counted from 0, as it runs past the end of its memory."""
    copy, calls = driver.copy, iter(range(1000))

    def spoiled(target: Any, source: Any, size: Any, *rest: Any) -> None:
        copy(target, source, size + (1 << 44) if next(calls) == number else size, *rest)

    monkeypatch.setattr(driver, "copy", spoiled)


def _fail_call(driver: Any, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Have the driver fail the call `number` of this name, counted from 0."""
    real, calls = driver._call, iter(range(10_000))

    def failing(name: str, *arguments: Any) -> Any:
        if name == call and next(calls) == number:
            raise DriverError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY", "injected")
        return real(name, *arguments)

    monkeypatch.setattr(driver, "_call", failing)


@strategies
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_failing_copy_fails_its_op_alone(
    strategy: str,
    direction: str,
    number: int,
    make_rank: MakeRank,
    finish: Finish,
    driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = make_rank([8192] * 4, staging_bytes=1, strategy=strategy)
    expected = rank.blocks(range(16))
    assert finish(rank.store(range(16), range(16))) is TicketState.DONE
    with monkeypatch.context() as patch:
        _fail_copy(driver, patch, number)
        op = rank.store if direction == "store" else rank.load
        ticket = op(range(16), range(16))
        assert finish(ticket) is TicketState.FAILED
    assert isinstance(ticket.error, DriverError)
    assert ticket.error.name == "CUDA_ERROR_INVALID_VALUE"
    assert str(pickle.loads(pickle.dumps(ticket.error))) == str(ticket.error)
    assert torch.zeros(4, device="cuda").sum().item() == 0
    assert finish(rank.store(range(16), range(16))) is TicketState.DONE
    rank.scramble()
    assert finish(rank.load(range(16), range(16))) is TicketState.DONE
    if direction == "store":
        np.testing.assert_array_equal(rank.blocks(range(16)), expected)


def test_slots_that_are_not_pinned_are_refused(make_rank: MakeRank) -> None:
    rank = make_rank()
    with pytest.raises(CopyError, match="pinned"):
        rank.store([0], [16])
    with pytest.raises(CopyError, match="pinned"):
        rank.load([-1], [0])


def test_blocks_that_do_not_exist_are_refused(make_rank: MakeRank, finish: Finish) -> None:
    rank = make_rank()
    for op in (rank.store, rank.load):
        with pytest.raises(CopyError, match="blocks 16"):
            op([16] if op == rank.store else [0], [0] if op == rank.store else [16])
    assert finish(rank.load([0], [0])) is TicketState.DONE, "nothing of them was queued"


def test_ops_of_a_closed_device_fail(make_rank: MakeRank, finish: Finish) -> None:
    rank = make_rank()
    rank.device.launch_load(1, [0], [0], None)
    never_begun = rank.device.launch_store(2, [0], [0], None)
    rank.device.close()
    assert finish(never_begun) is TicketState.FAILED
    with pytest.raises(CopyError, match="closed"):
        rank.store([0], [0])


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuModuleLoadData"])
def test_a_device_that_cannot_be_made_leaves_nothing_behind(
    call: str, make_rank: MakeRank, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank([1 << 20], staging_bytes=64 << 20, strategy="staged")
    rank.device.close()
    free, _ = torch.cuda.mem_get_info()
    with monkeypatch.context() as patch:
        _fail_call(driver, patch, call, 0 if call == "cuModuleLoadData" else 2)
        with pytest.raises(DriverError, match=call):
            rank.new_device()
    assert torch.cuda.mem_get_info()[0] == free


def test_memory_that_is_not_mapped_is_not_registered() -> None:
    registrar = CudaRegistrar()
    region = HostRegion(1 << 20)
    try:
        with pytest.raises(PinError, match="cuMemHostRegister"):
            registrar.register(region.address, 1 << 20)
        assert registrar.locked_bytes == 0
        region.commit(0, 1 << 20)
        registrar.register(region.address, 1 << 20)
        assert registrar.locked_bytes == 1 << 20
        registrar.unregister(region.address, 1 << 20)
        with pytest.raises(PinError, match="cuMemHostUnregister"):
            registrar.unregister(region.address, 1 << 20)
    finally:
        region.close()


def test_a_load_that_cannot_be_planned_holds_up_no_other(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker told that it failed, and all later loads of the rank waited for ever."""
    rank = make_rank([8192] * 4)
    worker = DataPlane(0, rank.pool, rank.device)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Split, "direct_copies", _raise_memory_error)
            assert _final(worker, Op(1, "load", (0,), (0,))).error == "MemoryError: "
        for op in (Op(2, "store", (1,), (1,)), Op(3, "load", (2,), (1,)), Op(4, "load", (3,), (1,))):
            assert _final(worker, op).mark == "done"
        np.testing.assert_array_equal(rank.blocks([2, 3]), rank.blocks([1, 1]))
    finally:
        worker.close()


def _raise_memory_error(*_: object) -> None:
    raise MemoryError


def _final(worker: DataPlane, op: Op) -> Completion:
    worker.submit(StepPlan((op,)))
    while True:
        assert worker.wait_completions(30.0)
        for completion in worker.take_completions():
            if completion.mark != "source_free":
                return completion


@strategies
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
@pytest.mark.parametrize("number", range(0, 24, 5))
def test_an_op_whose_marks_are_refused_is_over_when_the_device_has_released_it(
    call: str, number: int, direction: str, strategy: str, make_rank: MakeRank, finish: Finish, driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rank = make_rank([256 << 10] * 4, staging_bytes=1 << 20, strategy=strategy, chunk_bytes=32 << 20)
    assert finish(rank.store(range(16), range(16))) is TicketState.DONE
    with monkeypatch.context() as patch:
        _fail_call(driver, patch, call, number)
        op = rank.store if direction == "store" else rank.load
        ticket = op(range(16), range(16))
        if finish(ticket) is TicketState.FAILED:
            assert isinstance(ticket.error, DriverError)
            copier = rank.device._stores if direction == "store" else rank.device._loads
            streams = (copier._kv, *(buffer.link for buffer in copier._buffers))
            with primary_context(0).current():
                assert all(driver.is_idle(stream) for stream in streams)
    expected = rank.blocks(range(16))
    assert finish(rank.store(range(16), range(16))) is TicketState.DONE
    rank.scramble()
    assert finish(rank.load(range(16), range(16))) is TicketState.DONE
    np.testing.assert_array_equal(rank.blocks(range(16)), expected)
