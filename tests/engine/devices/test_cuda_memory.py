"""A pool that shrinks while the CUDA device copies: memory under a copy stays registered until the copy has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.doubles.fakes import rests
from tests.waiting import eventually

from kvstow.dataplane import DataPlane
from kvstow.messages import DesiredState, Direction, Op, StepPlan

SLOTS = 8


@pytest.fixture
def start_copy(cuda: Any, make_cuda_rank: Any, new_fence: Any) -> Iterator[Any]:
    """A data plane whose device has a copy of the top slot under way, which waits for the host's work."""

    ranks: list[Any] = []  # they keep the KV caches
    planes: list[DataPlane] = []

    def start(direction: Direction) -> DataPlane:
        ranks.append(rank := make_cuda_rank(slots=SLOTS))
        planes.append(plane := DataPlane(0, rank.pool, rank.device))
        fence, _ = new_fence()
        plane.submit(StepPlan((Op(1, direction, (0,), (SLOTS - 1,)),)), fence)
        eventually(lambda: {"copy", "gather", "scatter"} & {name for stream in cuda.streams for name in stream.names})
        return plane

    yield start
    for plane in planes:
        cuda.run()  # a copy that has not ended keeps the thread
        plane.close()


def _finish(cuda: Any, plane: DataPlane) -> str:
    for _ in range(1000):
        cuda.run()
        if plane.wait_completions(0.01):
            mark = plane.take_completions()[-1].mark
            if mark != "source_free":  # a store's first completion may come alone
                return mark
    raise AssertionError("the copy does not end")


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_shrink_waits_for_the_copy(
    cuda: Any, start_copy: Callable[[Direction], DataPlane], direction: Direction
) -> None:
    plane = start_copy(direction)
    plane.apply(DesiredState("engine", 1, number=1))
    assert rests(plane.pool)
    assert plane.report().pinned_slots == 1, "no other copy begins above it"
    assert _finish(cuda, plane) == "done"
    eventually(lambda: plane.pool.status().chunks_done == 1)
    assert cuda.offences == []
