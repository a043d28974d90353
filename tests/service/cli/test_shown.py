"""The words of `kvstow top` for the overview of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.api.test_columns import NOW, POOL
from tests.api.test_conditions import FITS, GIB, LARGER, SESSION
from tests.api.test_conditions import RANK as PLAIN

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import SLOT_STATES, PendingTransfers
from kvstow.status import MemoryStatus, RankStatus, TransferStatus
from kvstow_api.answers import (
    NO_TIER,
    ConditionView,
    InfoView,
    OverviewView,
    PoolCurveView,
    PoolView,
    TransfersView,
)
from kvstow_api.figures import CurvesView, CurveView, headline_of
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.shown import NOT_PINNED, RankRow, Sizes, overview, rank_rows, select_ranks

CURVES = CurvesView(
    pool="host",
    interval_seconds=5.0,
    now=NOW,
    items=[
        CurveView(figure="hit_ratio", label="hit ratio", unit="ratio", points=[0.5, None]),
        CurveView(figure="load_bytes_per_second", label="loads", unit="bytes_per_second", points=[1024.0, 2048.0]),
        CurveView(figure="store_bytes_per_second", label="stores", unit="bytes_per_second", points=[None, 4096.0]),
    ],
)
RANK = replace(PLAIN, pool="a", session="s1")
REASON = "1 pool, 1 session"
INFO = replace(
    msgspec.convert(EXAMPLES["InfoView"], InfoView),
    settings={"model": "some/model"},
    mode="test",
    version="1.2.3",
    host_name="node-7",
    attach="unix:/run/kvstow/attach.sock",
    node=True,
)
TRANSFER = msgspec.convert(EXAMPLES["TransferStatus"], TransferStatus)
TRANSFERS = TransfersView(
    pending=msgspec.convert(EXAMPLES["PendingTransfers"], PendingTransfers),
    load_choices={"layer_alone": 7, "async_burst": 1200},
    items=[TRANSFER],
)


def document(pools: Sequence[PoolView], **changes: Any) -> OverviewView:
    """Of a node with these pools, and of the only one of them."""
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    is_one = len(pools) == 1
    given: dict[str, Any] = {
        "time": INFO.started,
        "info": INFO,
        "state": "ready",
        "reason": REASON,
        "conditions": [],
        "memory": MemoryStatus(8 * GIB, 8 * GIB),
        "headline": headline_of([]),
        "selected": pools[0].name if is_one else None,
        "is_missing": False,
        "pools": pools,
        "sessions": [],
        "ranks": [],
        "tier": NO_TIER,
        "transfers": TRANSFERS,
        "curves": [CURVES],
        "stats": engine.stats() if is_one else None,
        "curve": FITS if is_one else None,
        "events": [],
        "omitted": {},
    }
    return OverviewView(**{**given, **changes})


def test_a_pool_has_the_curves_and_their_present_values() -> None:
    shown = overview(document([POOL]))
    assert shown.about == "some/model, test, version 1.2.3"
    pool = shown.pool
    assert pool is not None
    hits, bandwidth = pool.charts
    assert [curve.now for curve in (*hits.curves, *bandwidth.curves)] == ["25.0 %", "3 MiB/s", "1 MiB/s"]
    assert (hits.top, hits.scale, hits.curves[0].points) == (1.0, "0 to 100.0 %", [0.5, None])
    assert (bandwidth.top, bandwidth.scale) == (4096.0, "0 to 4 KiB/s")
    assert [curve.name for curve in bandwidth.curves] == ["loads", "stores"]
    assert pool.block_rates == "evicted for capacity: 12.0 blocks/s, dropped: 0.5 blocks/s"
    assert pool.slots == dict.fromkeys(SLOT_STATES, 0) | {NOT_PINNED: 16}


def condition(**changes: Any) -> ConditionView:
    given = {"name": "n", "severity": "warning", "what": "w", "why": "y", "fix": "f", "evidence": {}}
    return ConditionView(**{**given, **changes})


def test_rows_that_a_condition_concerns_are_marked() -> None:
    pools = [replace(POOL, name=name) for name in ("a", "b")]
    sessions = [replace(SESSION, id=name, pool="a").summary() for name in ("s1", "s2")]
    found = [condition(pool="a", session="s1"), condition(severity="info", pool="b", session="s2")]
    shown = overview(document(pools, sessions=sessions, conditions=found))
    assert [row.troubled for row in shown.pools.rows] == [True, False]
    assert [row.troubled for row in shown.sessions.rows] == [True, False]
    assert list(shown.conditions) == found


def test_the_reason_is_not_told_twice() -> None:
    degraded = {"state": "degraded", "reason": "rank 1 is silent"}
    assert overview(document([POOL], **degraded)).reason == "rank 1 is silent"
    assert overview(document([POOL], **degraded, conditions=[condition()])).reason == ""
    assert overview(document([POOL], conditions=[condition()])).reason == REASON


def test_what_the_document_leaves_out_is_counted() -> None:
    shown = overview(document([POOL], sessions=[SESSION.summary()], omitted={"sessions": 7, "pools": 3}))
    assert (shown.sessions.omitted, shown.pools.omitted, shown.tiers.omitted) == (7, 3, 0)
    two = shown.sessions._replace(rows=shown.sessions.rows * 2)
    assert two.limited(1).omitted == 8


def test_transfers_of_several_sessions_are_told_apart() -> None:
    transfers = replace(TRANSFERS, items=[replace(TRANSFER, session="s7")])
    session = replace(SESSION, pool=POOL.name).summary()
    two = document([POOL], sessions=[session, session], transfers=transfers)
    assert "session s7" in overview(two).oldest[0].note
    assert "session" not in overview(replace(two, sessions=[session])).oldest[0].note


# -- the pool that is shown --------------------------------------------------------------------------------------------


def test_the_sessions_of_a_selected_pool_do_not_name_it() -> None:
    pools = [replace(POOL, name=name) for name in ("a", "b")]
    found = [condition(session=RANK.session, rank=1)]
    given = document(pools, sessions=[SESSION.summary()], ranks=[RANK, replace(RANK, rank=1)], conditions=found)
    everything = overview(given)
    assert "pool" in everything.sessions.titles
    assert [row.troubled for row in everything.ranks] == [False, True]
    assert (everything.selected, everything.pool) == (None, None)
    one = overview(replace(given, selected="b"))
    assert "pool" not in one.sessions.titles
    assert (one.selected, one.choices, [row.name for row in one.pools.rows]) == ("b", ("a", "b"), ["a", "b"])


def test_a_pool_that_is_gone_is_missing() -> None:
    shown = overview(document([POOL], is_missing=True, selected=None, stats=None, curve=None))
    assert (shown.is_missing, shown.selected, shown.choices) == (True, None, ("host",))
    assert not overview(document([POOL])).is_missing


# -- ranks -------------------------------------------------------------------------------------------------------------


def line_of(rank: RankStatus) -> RankRow:
    (line,) = rank_rows([rank])
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
        ({"pinned_bytes": 2 * GIB, "state": "pinning", "pin_rate_bytes_per_second": 12.0 * GIB}, "2 GiB of 8 GiB"),
        ({"pinned_bytes": 2 * GIB, "state": "degraded", "pin_rate_bytes_per_second": GIB / 2}, "2 GiB of 8 GiB"),
    ],
)
def test_the_remaining_time_is_shown_for_a_rank_that_pins(changes: dict[str, Any], told: str) -> None:
    assert line_of(replace(RANK, **changes)).progress == told


def test_no_remaining_time_is_shown_while_pinning_is_paused() -> None:
    rank = replace(RANK, pinned_bytes=2 * GIB, state="pinning", pin_rate_bytes_per_second=GIB / 2)
    (line,) = rank_rows([rank], pinning_paused=True)
    assert line.progress == "2 GiB of 8 GiB"


def test_a_rank_shows_its_host_pid_and_device() -> None:
    assert line_of(replace(RANK, host=None, pid=None, device=None)).place == ""
    assert line_of(replace(RANK, host="node-7", pid=4711, device=None)).place == "node-7, pid 4711"
    assert line_of(replace(RANK, host="node-7", pid=4711, device="cuda:1")).place == "node-7, pid 4711, cuda:1"


def test_ranks_in_trouble_are_selected_first() -> None:
    ranks = [replace(RANK, rank=number, pinned_bytes=number * GIB) for number in range(6)]
    rows = rank_rows(ranks, troubled={(RANK.session, 5)})
    assert [rank.rank for rank in select_ranks(rows, 3)] == [0, 1, 5]


def test_ranks_of_several_sessions_are_told_apart() -> None:
    ranks = [replace(RANK, session=session, host="node-7", pid=1, device=None) for session in ("s1", "s2")]
    assert [row.place for row in rank_rows(ranks)] == ["s1, node-7, pid 1", "s2, node-7, pid 1"]
    assert [row.place for row in rank_rows(ranks[:1])] == ["node-7, pid 1"]


def test_how_loads_went_and_why_is_beside_what_is_in_flight() -> None:
    rows = {row.name: row for row in overview(document([POOL])).pending}
    assert rows["loads by layer"][1:] == ("7 of 1,207", "layer alone 7, async burst 1,200")


# -- sizes -------------------------------------------------------------------------------------------------------------


def sizes_of(curve: PoolCurveView, conditions: Sequence[ConditionView] = ()) -> Sizes:
    shown = overview(document([POOL], curve=curve, conditions=list(conditions))).pool
    assert shown is not None
    return shown.sizes


def test_sizes_have_their_shares_and_what_the_next_one_would_add() -> None:
    sizes = sizes_of(LARGER)
    assert (sizes.labels[0], sizes.labels[-1], sizes.now, sizes.next) == ("2 GiB", "128 GiB", 3, 4)
    assert (sizes.ratios, sizes.top) == ((0.06, 0.11, 0.18, 0.25, 0.34, 0.37, 0.374), 0.374)
    assert [(row.value, row.note) for row in sizes.figures] == [
        ("25.0 %", "now, with 16 GiB"),
        ("34.0 %", "with 32 GiB, the next useful size"),
        ("1h 26m", "of prefill saved an hour"),
    ]
    assert sizes.lru == (0.04, 0.07, 0.11, 0.16, 0.28, 0.36, 0.372)
    assert sizes_of(replace(LARGER, policy="lru")).lru == ()


def test_what_a_condition_tells_is_not_said_twice() -> None:
    told = ConditionView(name="pool_size", severity="info", pool="host", what="", why="", fix="", evidence={})
    assert sizes_of(LARGER).words == LARGER.advice
    assert sizes_of(LARGER, [told]).words == ""
    assert sizes_of(LARGER, [replace(told, pool="other")]).words == LARGER.advice


def test_without_evidence_there_are_only_words() -> None:
    sizes = sizes_of(replace(FITS, items=[], advice="too early to tell", saved_seconds_per_hour=None))
    assert (sizes.ratios, sizes.figures, sizes.now, sizes.words) == ((), (), None, "too early to tell")
