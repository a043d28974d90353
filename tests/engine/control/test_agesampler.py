from __future__ import annotations

from collections.abc import Callable

from tests.doubles.fakes import FakeClock
from tests.doubles.rank import make_ranks, store_keys

from kvstow.control.engine import OffloadEngine
from kvstow.stats import Histogram

MakeEngine = Callable[..., OffloadEngine]


def keys_of(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(first, first + count)]


def observed(snapshot: Histogram) -> dict[float, int]:
    """Observations by the upper bound of their bucket, without empty buckets."""
    bounds = (*snapshot.bounds, float("inf"))
    return {bound: count for bound, count in zip(bounds, snapshot.counts, strict=True) if count}


def test_a_look_up_observes_how_long_its_blocks_were_idle(make_engine: MakeEngine, clock: FakeClock) -> None:
    engine = make_engine(slots=61)
    store_keys(engine, make_ranks(engine), keys_of(0, 61))
    clock.advance(20.0)
    engine.release_lease(engine.acquire(keys_of(0, 61)))
    clock.advance(200.0)
    engine.release_lease(engine.acquire(keys_of(0, 61)))
    assert observed(engine.stats().ages.reuse_gap) == {30.0: 1, 300.0: 1}
    assert engine.stats().ages.reuse_gap.sum == 220.0


def test_one_block_in_61_is_sampled_for_any_batch_size(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=610)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, keys_of(0, 610))
    for first in range(0, 610, 10):
        engine.release_lease(engine.acquire(keys_of(first, 10)))
    assert sum(engine.stats().ages.reuse_gap.counts) == 10
    for first in range(0, 610, 5):
        store_keys(engine, ranks, keys_of(1000 + first, 5))
    assert sum(engine.stats().ages.lifetime.counts) == 10


def test_blocks_that_an_operator_removes_are_not_sampled(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=122)
    store_keys(engine, make_ranks(engine), keys_of(0, 122))
    sweep = engine.admin.purge(everything=True)
    while sweep.step():
        pass
    assert sum(engine.stats().ages.lifetime.counts) == 0
