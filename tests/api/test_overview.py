"""The overview behind the status page and `kvstow top`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.test_doctor import GIB, RANK

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import SLOT_STATES
from kvstow.status import BypassStatus, DrainStatus, RankStatus
from kvstow_api.history import HistoryView, NowView
from kvstow_api.overview import (
    NOT_PINNED,
    PoolReadings,
    RankLine,
    Readings,
    Switch,
    overview,
    rank_lines,
    select_ranks,
    switches,
)

OPEN = BypassStatus(load=False, store=False, ttl_seconds_left=None)
NO_DRAIN = DrainStatus(False, None, None, False, 0, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"bypass": BypassStatus(True, True, None)}, [("loads and stores are bypassed", "kvstow bypass --off")]),
        (
            {"bypass": BypassStatus(False, True, 90.0)},
            [("stores are bypassed for another 1m 30s", "kvstow bypass --off")],
        ),
        ({"pinning_paused": True}, [("pinning is paused", "kvstow pinning resume")]),
        (
            {"drain": DrainStatus(True, "all", 30.0, False, 2, 1)},
            [("draining: 2 transfers and 1 lease left, 30 s until the deadline", "kvstow undrain")],
        ),
        (
            {"drain": DrainStatus(True, "stop_stores", None, False, 1, 0)},
            [("draining (loads continue): 1 transfer and 0 leases left", "kvstow undrain")],
        ),
        (
            {"drain": DrainStatus(True, "all", None, True, 0, 0)},
            [("drained: nothing is in flight", "kvstow undrain")],
        ),
    ],
)
def test_switches_come_with_the_command_that_undoes_them(changes: dict[str, Any], told: list[Switch]) -> None:
    given = {"drain": NO_DRAIN, "bypass": OPEN, "pinning_paused": False, **changes}
    assert list(switches(**given)) == told


def line_of(rank: RankStatus) -> RankLine:
    (line,) = rank_lines([rank])
    return line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "8 GiB"),
        ({"pinned_bytes": 2 * GIB}, "2 GiB of 8 GiB"),
        (
            {"pinned_bytes": 2 * GIB, "state": "pinning", "pin_rate_bytes_per_second": GIB / 2},
            "2 GiB of 8 GiB, 512 MiB/s, 12 s left",
        ),
        ({"pinned_bytes": 2 * GIB, "state": "degraded", "pin_rate_bytes_per_second": GIB / 2}, "2 GiB of 8 GiB"),
    ],
)
def test_the_remaining_time_is_shown_for_a_rank_that_pins(changes: dict[str, Any], told: str) -> None:
    assert line_of(replace(RANK, **changes)).progress == told


def test_no_remaining_time_is_shown_while_pinning_is_paused() -> None:
    rank = replace(RANK, pinned_bytes=2 * GIB, state="pinning", pin_rate_bytes_per_second=GIB / 2)
    (line,) = rank_lines([rank], pinning_paused=True)
    assert line.progress == "2 GiB of 8 GiB"


def test_a_rank_shows_its_host_pid_and_device() -> None:
    assert line_of(replace(RANK, host=None, pid=None, device=None)).place == ""
    assert line_of(replace(RANK, host="node-7", pid=4711, device=None)).place == "node-7, pid 4711"
    assert line_of(replace(RANK, host="node-7", pid=4711, device="cuda:1")).place == "node-7, pid 4711, cuda:1"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"last_report_age_seconds": None}, ""),
        ({"error_reason": "memlock", "error": "no more"}, "memlock: no more"),
        ({"last_report_age_seconds": 75.0}, "last report 1m 15s ago"),
        ({"error": "no more", "last_report_age_seconds": 8.0}, "no more; last report 8 s ago"),
    ],
)
def test_silence_and_errors_are_the_trouble_of_a_rank(changes: dict[str, Any], told: str) -> None:
    assert line_of(replace(RANK, **changes)).trouble == told


def test_ranks_in_trouble_are_selected_first() -> None:
    ranks = [replace(RANK, rank=number, pinned_bytes=number * GIB) for number in range(6)]
    ranks[5] = replace(ranks[5], error="no more")
    assert [rank.rank for rank in select_ranks(rank_lines(ranks), 3)] == [0, 1, 5]


def test_present_values_are_those_of_the_history() -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    now = NowView(
        seconds=10.0,
        hit_ratio=0.25,
        load_bytes_per_second=3 << 20,
        store_bytes_per_second=1 << 20,
        stored_blocks_per_second=2.0,
        evicted_blocks_per_second=12.0,
        dropped_blocks_per_second=0.5,
        used_ratio=0.5,
        pinned_bytes=65536.0,
    )
    shown = overview(
        Readings(
            model="some/model",
            mode="test",
            version="1.2.3",
            readiness=engine.readiness(),
            drain=NO_DRAIN,
            bypass=OPEN,
            pool=PoolReadings(
                pinning_paused=False,
                stats=engine.stats(),
                oldest=[],
                history=HistoryView(interval_seconds=5.0, now=now, items=[]),
            ),
        )
    )
    assert shown.about == "some/model, test, version 1.2.3"
    pool = shown.pool
    assert pool is not None
    assert [curve.now for curve in (*pool.hits.curves, *pool.bandwidth.curves)] == ["25.0 %", "3 MiB/s", "1 MiB/s"]
    assert pool.block_rates == "evicted for capacity: 12.0 blocks/s, dropped: 0.5 blocks/s"
    assert pool.slots == dict.fromkeys(SLOT_STATES, 0) | {NOT_PINNED: 16}
