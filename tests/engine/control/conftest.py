from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.testing.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_engine(clock: FakeClock) -> Callable[..., OffloadEngine]:
    """Engines over `clock`, with few slots unless the test says otherwise."""

    def make(slots: int = 4, ranks: int = 1, slice_slots: int = SLICE_SLOTS, **settings: object) -> OffloadEngine:
        config = EngineConfig(slot_bytes=64, capacity_slots=slots, num_ranks=ranks, **settings)  # type: ignore[arg-type]
        return OffloadEngine(config, clock=clock, slice_slots=slice_slots)

    return make
