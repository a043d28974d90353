"""Copies are ordered against compute work: each safeguard is shown to hold, and its absence to corrupt.

A latch holds the compute stream, so that the order of events is made, not hoped for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.doubles.fakes import Latch

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaFence, CudaOptions
from kvstow.messages import StepPlan

MakeRank = Callable[..., Any]
Finish = Callable[[Any], TicketState]

_ROUNDS = 150
_BLOCKS = range(4)

strategies = pytest.mark.parametrize("strategy", ["staged", "direct"])


def _fill(rank: Any, value: int) -> None:
    for tensor in rank.tensors:
        tensor.fill_(value)


def _late_fill(rank: Any, latch: Any, value: int) -> CudaFence:
    """Compute work that writes the whole KV cache once the latch opens."""
    latch.close()
    with torch.cuda.stream(latch.stream):
        _fill(rank, value)
    return CudaFence.record(latch.stream)


def _rounds_with_wrong_bytes(one_round: Callable[[int], bool]) -> int:
    return sum(one_round(number) for number in range(_ROUNDS))


@strategies
@pytest.mark.parametrize(("fenced", "corrupt"), [(True, 0), (False, _ROUNDS)], ids=["fenced", "control"])
def test_a_store_reads_what_the_work_before_its_fence_wrote(
    strategy: str, fenced: bool, corrupt: int, make_rank: MakeRank, latch: Any, finish: Finish
) -> None:
    rank = make_rank([8192] * 4, strategy=strategy)

    def store_is_wrong(number: int) -> bool:
        old, new = number % 2, 2 + number % 2
        _fill(rank, old)
        torch.cuda.synchronize()
        fence = _late_fill(rank, latch, new)
        ticket = rank.store(_BLOCKS, _BLOCKS, fence if fenced else None)
        states = [ticket.poll() for _ in range(20)] if fenced else [finish(ticket)]
        assert set(states) == {TicketState.PENDING if fenced else TicketState.DONE}
        latch.open()
        assert finish(ticket) is TicketState.DONE
        torch.cuda.synchronize()
        return bool((rank.slots(_BLOCKS) != new).any())

    assert _rounds_with_wrong_bytes(store_is_wrong) == corrupt


@strategies
@pytest.mark.parametrize(("fenced", "corrupt"), [(True, 0), (False, _ROUNDS)], ids=["fenced", "control"])
def test_a_load_lands_after_the_older_work_that_writes_its_blocks(
    strategy: str, fenced: bool, corrupt: int, make_rank: MakeRank, latch: Any, finish: Finish
) -> None:
    rank = make_rank([8192] * 4, strategy=strategy)
    expected = rank.blocks(_BLOCKS)
    assert finish(rank.store(_BLOCKS, _BLOCKS)) is TicketState.DONE

    def load_is_wrong(number: int) -> bool:
        fence = _late_fill(rank, latch, number % 256)
        ticket = rank.load(_BLOCKS, _BLOCKS, fence if fenced else None)
        states = [ticket.poll() for _ in range(20)] if fenced else [finish(ticket)]
        assert set(states) == {TicketState.PENDING if fenced else TicketState.DONE}
        latch.open()
        assert finish(ticket) is TicketState.DONE
        torch.cuda.synchronize()
        return not np.array_equal(rank.blocks(_BLOCKS), expected)

    assert _rounds_with_wrong_bytes(load_is_wrong) == corrupt


@strategies
def test_blocks_may_be_overwritten_once_the_source_is_free(strategy: str, make_rank: MakeRank, finish: Finish) -> None:
    rank = make_rank([1 << 20], blocks=64, slots=64, strategy=strategy, chunk_bytes=64 << 20)
    for value in range(20):
        _fill(rank, value)
        torch.cuda.synchronize()
        ticket = rank.store(range(64), range(64))
        while ticket.poll() is TicketState.PENDING:
            pass
        _fill(rank, 255)
        assert finish(ticket) is TicketState.DONE
        assert (rank.slots(range(64)) == value).all()


def test_a_slot_recycled_while_a_load_waits_for_it_corrupts_the_load(
    make_rank: MakeRank, latch: Any, finish: Finish
) -> None:
    """The control of the next test: nothing below the control plane keeps a slot from being written."""
    rank = make_rank([8192] * 4, staging_bytes=1)
    for tensor in rank.tensors:
        tensor[11] = tensor[3]
    expected = rank.blocks(range(4))
    assert finish(rank.store(range(4), range(4))) is TicketState.DONE

    def load_is_wrong(number: int) -> bool:
        latch.close()
        load = rank.load(range(4), range(4), CudaFence.record(latch.stream))
        assert finish(rank.store([10], [3])) is TicketState.DONE  # two buffers hold slots 0 and 1
        latch.open()
        assert finish(load) is TicketState.DONE
        wrong = not np.array_equal(rank.blocks(range(4)), expected)
        assert finish(rank.store([11], [3])) is TicketState.DONE  # block 11 holds what block 3 held
        return wrong

    assert _rounds_with_wrong_bytes(load_is_wrong) == _ROUNDS


def test_a_leased_slot_is_not_recycled_while_a_load_waits_for_it(make_rank: MakeRank, latch: Any) -> None:
    rank = make_rank([8192] * 4, slots=4, staging_bytes=1)
    engine = OffloadEngine(EngineConfig(slot_bytes=rank.pool.slot_bytes, capacity_slots=4))
    worker = DataPlane(0, rank.pool, rank.device)
    try:
        engine.report(worker.report())
        expected = rank.blocks(range(4))
        keys = [bytes([number]) * 16 for number in range(4)]
        _run(engine, worker, engine.begin_store(keys, range(4)).op)
        for number in range(_ROUNDS):
            fence = _late_fill(rank, latch, number % 256)
            lease = engine.acquire(keys)
            assert len(lease.slots) == 4
            load = engine.begin_load(lease, range(4))
            worker.submit(StepPlan((load,)), fence)
            grant = engine.begin_store([b"new" + bytes([number])], [10])
            assert grant.op is None, "a slot that a load reads was given to a store"
            latch.open()
            _settle(engine, worker)
            torch.cuda.synchronize()
            np.testing.assert_array_equal(rank.blocks(range(4)), expected)
    finally:
        latch.open()
        worker.close()
        engine.close()


def _run(engine: OffloadEngine, worker: DataPlane, op: Any) -> None:
    worker.submit(StepPlan((op,)))
    _settle(engine, worker)


def _settle(engine: OffloadEngine, worker: DataPlane) -> None:
    """Wait for the one op under way, which must succeed."""
    marks: list[str] = []
    while not {"done", "failed"} & set(marks):
        assert worker.wait_completions(30.0)
        completions = worker.take_completions()
        engine.complete(0, worker.boot_id, completions)
        marks += [completion.mark for completion in completions]
    assert "failed" not in marks


@strategies
def test_a_store_that_waits_holds_up_no_load(strategy: str, make_rank: MakeRank, latch: Any, finish: Finish) -> None:
    rank = make_rank([8192] * 4, strategy=strategy)
    assert finish(rank.store([1], [1])) is TicketState.DONE
    latch.close()
    store = rank.store([0], [0], CudaFence.record(latch.stream))
    assert finish(rank.load([1], [1])) is TicketState.DONE
    assert store.poll() is TicketState.PENDING
    latch.open()
    assert finish(store) is TicketState.DONE


@strategies
def test_compute_does_not_wait_for_a_store_that_waits(strategy: str, make_rank: MakeRank, latch: Any) -> None:
    rank = make_rank([8192] * 4, strategy=strategy)
    latch.close()
    store = rank.store([0], [0], CudaFence.record(latch.stream))
    rank.tensors[1].fill_(3)
    torch.cuda.current_stream().synchronize()
    assert store.poll() is TicketState.PENDING
    latch.open()


@strategies
def test_a_small_copy_of_the_host_does_not_wait_for_a_whole_store(
    strategy: str, make_rank: MakeRank, finish: Finish
) -> None:
    """A sampled token's: it waits for the two batches that are queued, and 32 are to come. Smaller batches than the
    default would let the link run dry in between, and prove nothing."""
    pages, batch = [64 << 10] * 16, CudaOptions().staging_bytes
    rank = make_rank(pages, blocks=1024, slots=1024, chunk_bytes=256 << 20, staging_bytes=batch, strategy=strategy)
    token, host = torch.ones(1, device="cuda"), torch.zeros(1).pin_memory()
    torch.cuda.synchronize()
    ticket = rank.store(range(1024), range(1024))
    host.copy_(token, non_blocking=True)
    copied = CudaFence.record(torch.cuda.current_stream())
    while not copied.query():
        assert ticket.poll() is not TicketState.DONE
    assert host.item() == 1
    assert finish(ticket) is TicketState.DONE


@strategies
def test_a_fence_that_only_the_host_knows_is_kept(strategy: str, make_rank: MakeRank, finish: Finish) -> None:
    rank, fence = make_rank([8192] * 4, strategy=strategy), Latch()
    _fill(rank, 1)
    torch.cuda.synchronize()
    ticket = rank.store(_BLOCKS, _BLOCKS, fence)
    assert [ticket.poll() for _ in range(5)] == [TicketState.PENDING] * 5
    _fill(rank, 2)
    torch.cuda.synchronize()
    fence.open()
    assert finish(ticket) is TicketState.DONE
    assert (rank.slots(_BLOCKS) == 2).all()


def test_closing_waits_for_the_copies_under_way(make_rank: MakeRank) -> None:
    rank = make_rank([1 << 20], blocks=32, slots=32, chunk_bytes=64 << 20)
    expected = rank.blocks(range(32))
    ticket = rank.store(range(32), range(32))
    rank.device.close()
    assert ticket.poll() is TicketState.DONE
    np.testing.assert_array_equal(rank.slots(range(32)), expected)


def test_copies_go_on_while_a_graph_is_captured(make_rank: MakeRank, finish: Finish) -> None:
    """An event query would break a capture in global mode, were the copying thread's own mode not relaxed."""
    rank = make_rank([8192] * 4)
    expected, result = rank.blocks(range(16)), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result.add_(1)
        assert finish(rank.store(range(16), range(16))) is TicketState.DONE
        result.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert result.item() == 2
    np.testing.assert_array_equal(rank.slots(range(16)), expected)
