"""The overview behind the status page and `kvstow top`."""

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
from kvstow_api.answers import ConditionView, InfoView, PoolCurveView, PoolView, ReadinessView, TransfersView
from kvstow_api.figures import CurvesView, CurveView
from kvstow_api.openapi import EXAMPLES
from kvstow_api.overview import (
    NOT_PINNED,
    PoolReadings,
    RankRow,
    Readings,
    Sizes,
    overview,
    pool_to_show,
    rank_rows,
    select_ranks,
)

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
READINESS = ReadinessView(
    state="ready",
    reason="1 pool, 1 session",
    usable_slots=16,
    capacity_slots=16,
    ranks=(),
    memory=MemoryStatus(8 * GIB, 8 * GIB),
)
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


def readings(pools: Sequence[PoolView], **changes: Any) -> Readings:
    """Of a node with these pools, and of the only one of them."""
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    shown = PoolReadings(engine.stats(), (), CURVES, FITS)
    given: dict[str, Any] = {
        "info": INFO,
        "readiness": READINESS,
        "pools": pools,
        "sessions": [],
        "transfers": TRANSFERS,
        "asked": None,
        "pool": shown if len(pools) == 1 else None,
    }
    if "conditions" in changes:
        readiness = changes.get("readiness", READINESS)
        changes["readiness"] = replace(readiness, conditions=changes.pop("conditions"))
    return Readings(**{**given, **changes})


def test_a_pool_has_the_curves_and_their_present_values() -> None:
    shown = overview(readings([POOL]))
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
    sessions = [replace(SESSION, id=name, pool="a") for name in ("s1", "s2")]
    found = [condition(pool="a", session="s1"), condition(severity="info", pool="b", session="s2")]
    shown = overview(readings(pools, sessions=sessions, conditions=found))
    assert [row.troubled for row in shown.pools.rows] == [True, False]
    assert [row.troubled for row in shown.sessions.rows] == [True, False]
    assert list(shown.conditions) == found


def test_the_reason_is_not_told_twice() -> None:
    degraded = replace(READINESS, state="degraded", reason="rank 1 is silent")
    assert overview(readings([POOL], readiness=degraded)).reason == "rank 1 is silent"
    assert overview(readings([POOL], readiness=degraded, conditions=[condition()])).reason == ""
    assert overview(readings([POOL], conditions=[condition()])).reason == READINESS.reason


def test_transfers_of_several_sessions_are_told_apart() -> None:
    transfers = replace(TRANSFERS, items=[replace(TRANSFER, session="s7")])
    session = replace(SESSION, pool=POOL.name)
    two = readings([POOL], sessions=[session, session], transfers=transfers)
    assert "session s7" in overview(two).oldest[0].note
    assert "session" not in overview(two._replace(sessions=[session])).oldest[0].note


# -- the pool that is shown --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pools", "asked", "shown"),
    [
        ([], None, None),
        (["a"], None, "a"),
        (["a", "b"], None, None),
        (["a", "b"], "b", "b"),
        (["a"], "b", None),
    ],
)
def test_the_pool_that_is_shown_is_the_chosen_one_or_the_only_one(
    pools: list[str], asked: str | None, shown: str | None
) -> None:
    assert pool_to_show(pools, asked) == shown


def test_a_selected_pool_narrows_sessions_and_ranks() -> None:
    pools = [replace(POOL, name=name) for name in ("a", "b")]
    sessions = [replace(SESSION, id=f"in-{name}", pool=name) for name in ("a", "b")]
    readiness = replace(READINESS, ranks=(RANK, replace(RANK, rank=1)))
    found = [condition(session=RANK.session, rank=1)]
    given = readings(pools, sessions=sessions, readiness=readiness, conditions=found)
    everything = overview(given)
    assert [row.name for row in everything.sessions.rows] == ["in-a", "in-b"]
    assert "pool" in everything.sessions.titles
    assert [row.rank for row in everything.ranks] == [1], "of all pools only the ranks that a condition concerns"
    assert (everything.selected, everything.pool) == (None, None)
    chosen = PoolReadings(
        OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16)).stats(), (RANK,), CURVES, FITS
    )
    one = overview(given._replace(asked="b", pool=chosen))
    assert [row.name for row in one.sessions.rows] == ["in-b"]
    assert "pool" not in one.sessions.titles
    assert [row.rank for row in one.ranks] == [RANK.rank]
    assert (one.selected, one.choices, [row.name for row in one.pools.rows]) == ("b", ("a", "b"), ["a", "b"])


def test_a_pool_that_is_gone_is_missing() -> None:
    shown = overview(readings([POOL], asked="gone", pool=None))
    assert (shown.is_missing, shown.selected, shown.choices) == (True, None, ("host",))
    assert not overview(readings([POOL])).is_missing


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
    rows = {row.name: row for row in overview(readings([POOL])).pending}
    assert rows["loads by layer"][1:] == ("7 of 1,207", "layer alone 7, async burst 1,200")


# -- sizes -------------------------------------------------------------------------------------------------------------


def sizes_of(curve: PoolCurveView, conditions: Sequence[ConditionView] = ()) -> Sizes:
    given = readings([POOL])
    assert given.pool is not None
    shown = overview(
        given._replace(pool=given.pool._replace(curve=curve), readiness=replace(READINESS, conditions=list(conditions)))
    ).pool
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
