"""Fences take their events from a pool: an event is recorded again only when nobody asks for it or waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaFence
from kvstow.devices.cuda.context import primary_context

MakeRank = Callable[..., Any]
Finish = Callable[[Any], TicketState]

_ROUNDS = 100
_BLOCKS = range(4)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each event that the driver makes."""
    driver, created = primary_context(0).driver, list[bool]()
    create = driver.create_event

    def counted(*, timing: bool) -> Any:
        created.append(timing)
        return create(timing=timing)

    monkeypatch.setattr(driver, "create_event", counted)
    return created


def test_many_fences_need_few_events(make_rank: MakeRank, finish: Finish, created: list[bool]) -> None:
    rank, chance = make_rank([4096] * 4, blocks=64, slots=64), random.Random(0)
    stream = torch.cuda.current_stream()
    primary_context(0)._idle_events.clear()
    del created[:]
    expected = rank.blocks(range(64))
    assert finish(rank.store(range(64), range(64))) is TicketState.DONE
    for _ in range(3000):
        blocks = chance.sample(range(64), 4)
        fences = [CudaFence.record(stream) for _ in range(chance.randint(1, 4))]
        op = rank.store if chance.random() < 0.5 else rank.load
        assert finish(op(blocks, blocks, fences[-1])) is TicketState.DONE
    assert 0 < len(created) <= 12
    np.testing.assert_array_equal(rank.blocks(range(64)), expected)


@pytest.mark.parametrize("strategy", ["staged", "direct"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_op_waits_for_its_own_fence_however_many_come_and_go_meanwhile(
    direction: str, strategy: str, make_rank: MakeRank, latch: Any, finish: Finish, created: list[bool]
) -> None:
    rank, other = make_rank([8192] * 4, strategy=strategy), torch.cuda.current_stream()
    for tensor in rank.tensors:
        tensor.fill_(1)  # CUDA loads a kernel at its first launch, and would wait for the closed latch to do so
    torch.cuda.synchronize()
    kept = rank.blocks(_BLOCKS)
    assert finish(rank.store(_BLOCKS, _BLOCKS)) is TicketState.DONE
    del created[:]
    for number in range(_ROUNDS):
        value = number % 256
        latch.close()
        with torch.cuda.stream(latch.stream):
            for tensor in rank.tensors:
                tensor.fill_(value)
        op = rank.store if direction == "store" else rank.load
        ticket = op(_BLOCKS, _BLOCKS, CudaFence.record(latch.stream))
        for _ in range(20):
            assert ticket.poll() is TicketState.PENDING
            assert _becomes_reached(CudaFence.record(other))
        latch.open()
        assert finish(ticket) is TicketState.DONE
        torch.cuda.synchronize()
        if direction == "store":
            assert (rank.slots(_BLOCKS) == value).all()
        else:
            np.testing.assert_array_equal(rank.blocks(_BLOCKS), kept)
    assert len(created) <= 8


def _becomes_reached(fence: CudaFence) -> bool:
    return any(fence.query() for _ in range(1_000_000))
