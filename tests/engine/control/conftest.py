from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import inf
from typing import cast

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import OffloadEngine, PoolFacade
from kvstow.control.pool import SLICE_SLOTS
from kvstow.control.sharedpool import SharedPool

MakeEngine = Callable[..., OffloadEngine]


class AttachedEngine(AttachedSession, PoolFacade):
    """The only session of a shared pool, with the calls of an `OffloadEngine`."""

    def __init__(self, pool: SharedPool) -> None:
        AttachedSession.__init__(self, pool, 1, "engine", "model")
        PoolFacade.__init__(self, pool)
        self.label = ""

    def adapt_to_pool(self) -> None:
        """Without the limit of leases, which has tests of its own."""
        super().adapt_to_pool()
        self.leases.max_slots = inf


@pytest.fixture(scope="module")
def no_log_lines() -> Iterator[None]:
    """For modules in which failures are common."""
    logger = logging.getLogger("kvstow")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_engine(clock: FakeClock) -> MakeEngine:
    """Engines over `clock`, with few slots unless the test says otherwise."""

    def make(slots: int = 4, ranks: int = 1, slice_slots: int = SLICE_SLOTS, **settings: object) -> OffloadEngine:
        config = EngineConfig(slot_bytes=64, capacity_slots=slots, num_ranks=ranks, **settings)  # type: ignore[arg-type]
        return OffloadEngine(config, clock=clock, slice_slots=slice_slots)

    return make


@pytest.fixture(params=["embedded", "attached"])
def make_host(request: pytest.FixtureRequest, clock: FakeClock, make_engine: MakeEngine) -> MakeEngine:
    """`make_engine` for both hosts: an engine with a pool of its own, and one that is attached to a pool."""
    if request.param == "embedded":
        return make_engine

    def make(slots: int = 4, ranks: int = 1, slice_slots: int = SLICE_SLOTS, **settings: object) -> OffloadEngine:
        config = EngineConfig(slot_bytes=64, capacity_slots=slots, num_ranks=ranks, **settings)  # type: ignore[arg-type]
        pool = SharedPool(config, clock=clock, slice_slots=slice_slots)
        for _ in range(slots):
            pool.add_extent(1)  # so that it can be resized to any number
        pool.set_populated(slots)
        return cast(OffloadEngine, AttachedEngine(pool))

    return make
