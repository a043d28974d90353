"""The table of figures, its curves, and how often the sampler takes what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import EngineStats
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.figures import (
    CURVE_INTERVAL,
    CURVE_POINTS,
    CURVES,
    FIGURES,
    NowView,
    Sample,
    curves_of,
    now_of,
    saved_per_hour,
    seconds_per_ratio,
)
from kvstow_api.journal import Journal
from kvstow_api.sampler import Sampler


def sample(seconds: float, change: Callable[[EngineStats], object] = lambda stats: None) -> Sample:
    stats = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8)).stats()
    change(stats)
    return Sample(seconds, stats)


def lookups(seconds: float, queries: int, hits: int) -> Sample:
    def change(stats: EngineStats) -> None:
        stats.lookups.query_blocks, stats.lookups.hit_blocks = queries, hits

    return sample(seconds, change)


def loads(seconds: float, num_bytes: int) -> Sample:
    def change(stats: EngineStats) -> None:
        stats.transfers.load.bytes = num_bytes

    return sample(seconds, change)


def points(figure: str, *samples: Sample) -> list[float | None]:
    return curves_of("host", samples).points[figure]


def test_points_are_rates_between_samples() -> None:
    another_life = loads(15, 1 << 20)
    rates = points("load_bytes_per_second", loads(0, 0), loads(5, 5 << 20), loads(10, 15 << 20), another_life)
    assert rates == [1 << 20, 2 << 20, None]
    ratios = points("hit_ratio", lookups(0, 0, 0), lookups(5, 10, 5), lookups(10, 10, 5), lookups(15, 2, 2))
    assert ratios == [0.5, None, None]
    assert points("store_bytes_per_second", loads(0, 0), loads(5, 1)) == [0.0]
    assert points("hit_ratio", lookups(0, 0, 0)) == points("hit_ratio") == []


def test_now_covers_ten_seconds() -> None:
    now = now_of([lookups(5 * n, 10 * n, n * n) for n in range(5)])
    assert (now.seconds, now.hit_ratio) == (10.0, (16 - 4) / 20)
    assert (now_of([]).seconds, now_of([]).hit_ratio, now_of([loads(0, 1)]).load_bytes_per_second) == (0.0, None, None)


def test_every_present_figure_is_in_the_table_and_those_that_are_drawn_too() -> None:
    assert {field.name for field in fields(NowView)} == {"seconds", *FIGURES}
    assert set(CURVES) <= set(FIGURES)
    assert set(curves_of("host", ()).points) == set(CURVES)


def test_the_hit_ratio_now_ignores_old_samples() -> None:
    def hits(*hits_of_samples: int) -> float | None:
        return now_of([lookups(5 * n, 2 * hits, hits) for n, hits in enumerate(hits_of_samples)]).hit_ratio

    assert hits() is None
    assert hits(0, 1) == 0.5
    assert hits(0, 1, 1) == 0.5
    assert hits(0, 1, 1, 1) is None


def test_a_curve_has_every_fifth_sample_and_five_minutes(engine: OffloadEngine, ranks: Any, keys: list[bytes]) -> None:
    sampler = Sampler(EmbeddedDirectory(engine, 16), Journal())
    sampler.tick()
    ranks.store(keys[:3])
    for _ in range(5):
        sampler.tick()
    first, last = sampler.of_pool("host").kept
    assert (first.stats.transfers.store.bytes, last.stats.transfers.store.bytes) == (0, 3 * 4096)
    for _ in range(5 * 100):
        sampler.tick()
    samples = sampler.of_pool("host")
    assert {len(points) for points in curves_of("host", samples.kept).points.values()} == {CURVE_POINTS}
    assert CURVE_POINTS * CURVE_INTERVAL == 300.0  # as the page says


def test_evicted_is_for_room_and_dropped_is_without_failures(
    engine: OffloadEngine, ranks: Any, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((100.0, 102.0))
    monkeypatch.setattr("kvstow_api.sampler.time.monotonic", lambda: next(moments))
    monkeypatch.setattr(EmbeddedDirectory, "sessions", lambda self: [])
    sampler = Sampler(EmbeddedDirectory(engine, 16), Journal())
    ranks.store(keys)  # the pool is full
    sampler.tick()
    engine.admin.evict(slots=3).run()
    ranks.finish(ranks.begin_store([b"failed"]), "failed")
    ranks.store([b"more", b"most", b"much", b"many", b"last"])  # three find room
    engine.admin.drain("stop_stores", None)
    engine.begin_store([b"dropped", b"dropped too"], range(2))
    sampler.tick()
    assert engine.stats().evictions["operator"] == 3
    assert engine.stats().stores["failed"] == 1
    now = now_of(sampler.of_pool("host").recent)
    assert (now.evicted_blocks_per_second, now.dropped_blocks_per_second) == (1.0, 1.0)


# -- what hits save ----------------------------------------------------------------------------------------------------


def saving(seconds: float, *, saved: float, tokens: int, queried: int, block_tokens: int | None = 16) -> Sample:
    stats = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8, block_tokens=block_tokens)).stats()
    stats.prefill.seconds_saved, stats.prefill.hit_tokens = saved, tokens
    stats.lookups.query_blocks = queried
    return Sample(seconds, stats)


def test_what_hits_save_in_an_hour_is_that_of_the_last_samples() -> None:
    samples = [saving(0, saved=100.0, tokens=1600, queried=0), saving(300, saved=110.0, tokens=1760, queried=600)]
    assert saved_per_hour(samples) == 120.0
    assert saved_per_hour(samples[:1]) is None
    assert saved_per_hour(samples[::-1]) is None
    assert saved_per_hour([saving(number, saved=0.0, tokens=0, queried=9) for number in (0, 1)]) is None


def test_more_hits_are_worth_what_hits_have_saved_so_far() -> None:
    """1/16 of a second for each token; 120 blocks of 16 tokens are looked up in a minute."""
    samples = [saving(0, saved=100.0, tokens=1600, queried=0), saving(300, saved=110.0, tokens=1760, queried=600)]
    assert seconds_per_ratio(samples) == pytest.approx(120.0)
    assert seconds_per_ratio(samples[:1]) is None
    assert seconds_per_ratio([samples[0], replace_tokens(samples[1])]) is None


def replace_tokens(sample: Sample) -> Sample:
    """Of a pool whose number of tokens in a block is unknown."""
    return saving(sample.time, saved=110.0, tokens=1760, queried=600, block_tokens=None)
