"""The curve: what pools of other sizes would have hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from threading import Lock

import pytest
from tests.doubles.rank import use_keys

from kvstow.config import EngineConfig
from kvstow.control.chains import Chains, Running
from kvstow.control.curve import TIMES, Curve
from kvstow.control.engine import OffloadEngine
from kvstow.control.hazards import Hazards
from kvstow.control.pool import Pool
from kvstow.control.slots import RefCounts
from kvstow.stats import LookupStats
from kvstow.status import SizeCurve
from kvstow_service.replay.hittable import Admitted, TimedPool

OWN = TIMES.index(1.0)


def key(*numbers: int, seed: int = 0) -> bytes:
    return b"\0\0" + blake2b(repr(numbers).encode(), key=bytes([seed]), digest_size=32).digest()


def traffic(count: int, documents: int, seed: int = 0) -> list[list[bytes]]:
    """Requests that share a system prompt and popular documents, each with an end of its own."""
    choose = random.Random(1)
    requests = []
    for number in range(count):
        document = min(int(choose.expovariate(5 / documents)), documents)
        own = range(choose.randint(1, 8))
        numbers = [(0,), (1,), *[(2, document, at) for at in range(10)], *[(3, number, at) for at in own]]
        requests.append([key(*each, seed=seed) for each in numbers])
    return requests


def serve(pool: TimedPool, requests: Sequence[Sequence[bytes]], start: float = 0.0) -> list[int]:
    """Requests that each run for a few seconds, one a second. Returns the hits of each."""
    found: list[int] = []
    running: list[tuple[float, Admitted]] = []
    for number, keys in enumerate(requests):
        now = start + number
        pool.tick(now)
        while running and running[0][0] <= now:
            pool.end(running.pop(0)[1], now)
        admitted = pool.admit(keys, now)
        found.append(admitted.found)
        running.append((now + 4.5, admitted))
    for ends, admitted in running:
        pool.end(admitted, ends)
    pool.engine.tick()
    return found


def curve_of(pool: TimedPool) -> SizeCurve:
    curve = pool.engine.curve()
    assert curve is not None
    return curve


def timed_pool(slots: int, policy: str = "auto", most_keys: int | None = None) -> TimedPool:
    pool = TimedPool(slots, policy, curve=True)
    inner: Pool = pool.engine.pool
    if most_keys is not None:
        inner.requests.curve = Curve(inner.index.chains.hazards, inner.lock, inner.clock, most_keys)
    return pool


def window_of(pool: TimedPool, count: int) -> slice:
    """Which of the first `count` requests the curve is about."""
    evidence, curve = pool.engine.curve_evidence(), curve_of(pool)
    assert evidence is not None
    first = count - evidence.requests  # the last ones, and some that are newer
    return slice(first, first + curve.requests)


def errors_of(pool: TimedPool, requests: Sequence[Sequence[bytes]], policy: str) -> list[float]:
    """By how much half the pool, and twice the pool, differ from real pools of that size."""
    curve, last = curve_of(pool), window_of(pool, len(requests))
    blocks = sum(map(len, requests[last]))
    found = []
    for point in (curve.points[OWN - 1], curve.points[OWN + 1]):
        hits = serve(TimedPool(point.num_slots, policy), requests)
        found.append(abs(point.ratio - sum(hits[last]) / blocks))
    return found


@pytest.mark.parametrize(("policy", "bar"), [("lru", 0.001), ("auto", 0.02)])
def test_where_all_keys_are_followed_each_size_hits_what_a_real_pool_hits(policy: str, bar: float) -> None:
    """In the order of last use exactly, but for the requests that are not in the window yet."""
    requests = traffic(300, 20)
    pool = timed_pool(64, policy)
    serve(pool, requests)
    assert max(errors_of(pool, requests, policy)) < bar


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_the_keys_predicts_the_hits(seed: int) -> None:
    """Whatever the hashes are: the first blocks, which all requests have, are in no sample or in all."""
    requests = traffic(400, 60, seed)
    pool = timed_pool(200, "lru", most_keys=3200)
    serve(pool, requests)
    curve = curve_of(pool)
    assert 0.01 < curve.points[OWN].error < 0.1
    assert max(errors_of(pool, requests, "lru")) < 0.06


def test_the_present_size_has_the_figure_of_the_pool_itself() -> None:
    requests = traffic(300, 20)
    pool = timed_pool(64, most_keys=400)
    hits = serve(pool, requests)
    curve = curve_of(pool)
    lookups = pool.engine.stats().lookups
    assert lookups.hit_blocks == sum(hits)
    last = window_of(pool, len(requests))
    assert curve.points[OWN].ratio == pytest.approx(sum(hits[last]) / sum(map(len, requests[last])), abs=0.005)


def test_a_window_begins_when_the_pool_is_full_and_larger_sizes_are_lower_bounds_until_they_were() -> None:
    pool = timed_pool(160, "lru")
    requests = traffic(600, 10_000)  # nearly all blocks are new
    serve(pool, requests[:8])
    evidence = pool.engine.curve_evidence()
    assert evidence is not None
    assert 0 < evidence.seen < evidence.needed_seen == 160
    assert evidence.seconds_left is not None
    assert evidence.seconds_left > 0
    assert pool.engine.curve() is None
    serve(pool, requests[8:20], 10.0)
    evidence = pool.engine.curve_evidence()
    assert evidence is not None
    assert (evidence.seen, evidence.needed_requests) == (160, 160)
    assert evidence.requests < 12, "those before the pool was full do not count"
    serve(pool, requests[20:220], 30.0)
    curve = curve_of(pool)
    bounds = [point.at_least for point in curve.points]
    assert bounds == sorted(bounds)
    assert not any(bounds[: OWN + 1])
    assert bounds[-1]
    assert all((point.seconds_left is not None) == point.at_least for point in curve.points)
    serve(pool, requests[220:], 300.0)
    assert sum(point.at_least for point in curve_of(pool).points) < sum(bounds)


def test_another_size_begins_anew() -> None:
    requests = traffic(300, 20)
    pool = timed_pool(64)
    serve(pool, requests)
    assert pool.engine.curve() is not None
    curve = pool.engine.pool.requests.curve
    assert curve is not None
    curve.follow(66, is_lru=False)
    assert pool.engine.curve() is not None, "hardly another size"
    curve.follow(128, is_lru=False)
    evidence = pool.engine.curve_evidence()
    assert evidence is not None
    assert (evidence.seen, evidence.needed_seen, evidence.requests) == (0, 128, 0)
    assert pool.engine.curve() is None


@pytest.mark.parametrize("most_keys", [None, 640])
def test_a_client_whose_chains_are_none_harms_no_other(most_keys: int | None) -> None:
    """Repeated keys, and keys that follow others than before."""
    pool = timed_pool(40, most_keys=most_keys)
    choose = random.Random(1)
    curve = pool.engine.pool.requests.curve
    assert curve is not None
    for number in range(200):
        pool.serve([key(choose.randrange(60)) for _ in range(choose.randint(1, 30))], float(number))
        pool.tick(float(number))
        assert curve.defects() == []
    requests = traffic(300, 20)
    serve(pool, requests, 1000.0)
    assert curve.defects() == []
    assert pool.engine.curve() is not None


def test_nothing_is_said_of_keys_that_are_never_in_the_sample() -> None:
    pool = timed_pool(2000, most_keys=1)
    keys = [key(number) for number in range(300)]
    for number in range(400):
        pool.serve(keys[number % 300 :][:1], float(number))
        pool.tick(float(number))
    assert pool.engine.curve() is None


def test_a_beginning_that_is_used_alone_has_waited_as_long_as_its_chain() -> None:
    hazards = Hazards()
    curve = Curve(hazards, Lock(), lambda: 0.0)
    order = Chains(hazards, RefCounts()).make_order(0)
    rows = []
    for chain, again, start in (([key(1)], [key(1)], 1000.0), ([key(2), key(3)], [key(2)], 1100.0)):
        for keys, begun in ((chain, start), (again, start + 30)):
            running = Running(order, 1.0, lambda: None)
            curve.admit(running, keys, begun, None, LookupStats())
            curve.end(running, (), 3, begun + 5)
        curve.follow(16, is_lru=False)
        rows.append(len(hazards.observed()[0]))
    assert rows[0] == rows[1], "the pause is the same, and so is the class"


def test_a_class_that_only_a_larger_size_has_gets_its_row_in_the_table_of_the_pool() -> None:
    hazards, now = Hazards(), 0.0
    curve = Curve(hazards, Lock(), lambda: now)
    order = Chains(hazards, RefCounts()).make_order(0)
    curve.follow(16, is_lru=False)
    for number in range(3):
        running = Running(order, 1.0, lambda: None)
        curve.admit(running, [key(1)], 10.0 * number, None, LookupStats())
        curve.end(running, (), 3, 10.0 * number + 5)
    rows = len(hazards.observed()[0])
    curve.follow(16, is_lru=False)
    assert len(hazards.observed()[0]) == rows + 4, "of one use, and of more: running, and ended so"


def test_requests_that_are_too_many_to_follow_begin_a_thinner_sample(make_engine: Callable[..., OffloadEngine]) -> None:
    pool = make_engine().pool
    curve = pool.requests.curve
    assert curve is not None
    curve.follow(1 << 20, is_lru=False)
    step = curve.step
    running = pool.index.chains.begin(pool.sessions[0].namespace.order, 0.0)
    chain = [key(number) for number in range(1 << 16)]
    for _ in range(18):
        curve.admit(running, chain, 0.0, None, LookupStats())
    curve.follow(1 << 20, is_lru=False)
    assert curve.step == 2 * step


def test_without_the_setting_nothing_is_followed(make_engine: Callable[..., OffloadEngine]) -> None:
    engine = make_engine(curve=False)
    assert engine.pool.requests.curve is None
    use_keys(engine, [key(1)])
    engine.tick()
    assert (engine.curve(), engine.curve_evidence()) == (None, None)


def test_the_curve_is_on_by_default() -> None:
    assert EngineConfig(slot_bytes=64, capacity_slots=4).curve
