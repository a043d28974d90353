"""A rank's computation waits for its load by layer: each layer for its own part, and what follows for all of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstow.errors import CopyError
from kvstow.messages import Op, StepPlan
from kvstow_service.connectors.engine_core.stepplan import PlannedStep
from kvstow_service.connectors.engine_core.workerside import LayerWaits, NoDataPlane, WorkerSide

PARTS = {"layer.0": 0, "layer.1": 1, "layer.2": 2, "shares.1": 1}


class FakeLoad:
    def __init__(self) -> None:
        self.waits: list[int] = []
        self.ticket: Any = None

    def wait(self, part: int) -> None:
        self.waits.append(part)


@pytest.fixture
def waits() -> LayerWaits:
    waits = LayerWaits()
    waits.part_of = PARTS
    return waits


def compute(waits: LayerWaits, *layers: str) -> None:
    for layer in layers:
        waits.layer(layer)


def test_each_layer_waits_for_its_own_part_as_often_as_its_hook_is_called(waits: LayerWaits) -> None:
    """Micro-batches call each hook twice, each with a stream of its own."""
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    compute(waits, "layer.0", "layer.0", "layer.1", "shares.1", "unknown")
    assert load.waits == [0, 0, 1, 1]


def test_what_follows_the_step_waits_for_all_of_the_load(waits: LayerWaits) -> None:
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    waits.end(3)
    assert load.waits == [2]
    compute(waits, "layer.0")
    waits.end(3)
    assert load.waits == [2]


def test_layers_whose_hook_was_never_called_are_waited_for_first(waits: LayerWaits) -> None:
    compute(waits, "layer.0", "layer.2", "shares.1")
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    assert load.waits == [1]


def test_a_step_without_hooks_waits_for_everything_first(waits: LayerWaits) -> None:
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=False)
    assert load.waits == [2]


def test_before_layers_are_known_everything_is_waited_for(waits: LayerWaits) -> None:
    waits.part_of = {}
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    assert load.waits == [2]


def _step(boot: str) -> PlannedStep:
    layered = StepPlan((Op(1, "load", (5,), (0,), boots=(boot,)),))
    return PlannedStep(1, StepPlan(), StepPlan(), (), {}, layered)


def test_a_rank_that_has_lost_the_blocks_does_not_compute() -> None:
    side = WorkerSide(0, NoDataPlane(0, 64), loads_wait=True)
    with pytest.raises(CopyError, match="has lost"):
        side.begin_step(_step("an older boot"))


def test_a_rank_without_a_data_plane_does_not_compute() -> None:
    plane = NoDataPlane(0, 64)
    side = WorkerSide(0, plane, loads_wait=True)
    side.begin_step(_step(plane.boot_id))
    with pytest.raises(CopyError, match="no data plane"):
        side.load_layers(hooks_run=True)
    side.load_layers(hooks_run=True)  # nothing is left to load


class FakeLoads:
    """Notes after what a load was to begin."""

    num_parts, failure = 3, None

    def __init__(self) -> None:
        self.after: list[Any] = []

    def load(self, ops: Any, after: Any) -> FakeLoad:
        self.after.append(after)
        return FakeLoad()


def test_blocks_are_written_after_the_work_that_the_compute_stream_has_by_then() -> None:
    """A freed block may still be written by an older step, also where loads before the step wait for nothing."""
    plane: Any = NoDataPlane(0, 64)
    plane.layered = loads = FakeLoads()
    side = WorkerSide(0, plane, loads_wait=False)
    fence: Any = object()
    side.fence = lambda: fence
    side.begin_step(_step(plane.boot_id))
    side.load_layers(hooks_run=True)
    assert loads.after == [fence]
