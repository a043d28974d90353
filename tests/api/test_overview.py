"""The overview behind the status page and `kvstow top`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.api.test_doctor import GIB
from tests.api.test_doctor import RANK as OF_DOCTOR

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import SLOT_STATES, PendingTransfers, SlotCounts
from kvstow.status import BypassStatus, DrainStatus, MemoryStatus
from kvstow_api.client.decoding import decode
from kvstow_api.history import HistoryView, NowView
from kvstow_api.openapi import EXAMPLES
from kvstow_api.overview import (
    NOT_PINNED,
    PoolReadings,
    Readings,
    Switch,
    overview,
    pool_to_show,
    select_rows,
    switches,
)
from kvstow_api.poolrows import pool_row
from kvstow_api.rankrows import RankRow, rank_rows, select_ranks
from kvstow_api.sessionrows import session_row
from kvstow_api.views import (
    PoolView,
    RankView,
    ReadinessView,
    SessionRankView,
    SessionView,
    TransfersView,
    TransferView,
)

RANK = RankView(**asdict(OF_DOCTOR), pool="a", session="s1")
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
        ({"paused": ["host"]}, [("pinning is paused", "kvstow pinning resume")]),
        (
            {"paused": ["a-1"], "several": True},
            [("pinning is paused in pool a-1", "kvstow pinning resume --pool a-1")],
        ),
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
    given = {"drain": NO_DRAIN, "bypass": OPEN, **changes}
    assert list(switches(**given)) == told


def line_of(rank: RankView) -> RankRow:
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
    assert [rank.rank for rank in select_ranks(rank_rows(ranks), 3)] == [0, 1, 5]


NOW = NowView(
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


HISTORY = HistoryView(pool="host", interval_seconds=5.0, now=NOW, items=[])


READINESS = ReadinessView(
    state="ready",
    reason="1 pool, 1 session",
    usable_slots=16,
    capacity_slots=16,
    ranks=(),
    pools=[],
    memory=MemoryStatus(8 * GIB, 8 * GIB),
)
TRANSFER = decode(TransferView, EXAMPLES["TransferView"])
TRANSFERS = TransfersView(pending=decode(PendingTransfers, EXAMPLES["PendingTransfers"]), items=[TRANSFER])


def readings(pools: Sequence[PoolView], **changes: Any) -> Readings:
    """Of a node with these pools, and of the only one of them."""
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    shown = PoolReadings(engine.stats(), (), HISTORY)
    given: dict[str, Any] = {
        "model": "some/model",
        "mode": "test",
        "version": "1.2.3",
        "node": True,
        "readiness": READINESS,
        "drain": NO_DRAIN,
        "bypass": OPEN,
        "pools": pools,
        "sessions": [],
        "transfers": TRANSFERS,
        "asked": None,
        "pool": shown if len(pools) == 1 else None,
    }
    return Readings(**{**given, **changes})


def test_present_values_are_those_of_the_history() -> None:
    shown = overview(readings([POOL]))
    assert shown.about == "some/model, test, version 1.2.3"
    pool = shown.pool
    assert pool is not None
    assert [curve.now for curve in (*pool.hits.curves, *pool.bandwidth.curves)] == ["25.0 %", "3 MiB/s", "1 MiB/s"]
    assert pool.block_rates == "evicted for capacity: 12.0 blocks/s, dropped: 0.5 blocks/s"
    assert pool.slots == dict.fromkeys(SLOT_STATES, 0) | {NOT_PINNED: 16}


# -- rows ----------------------------------------------------------------------------------------------------------

POOL = decode(PoolView, EXAMPLES["PoolView"])
SESSION = decode(SessionView, EXAMPLES["SessionView"])


def test_the_row_of_a_pool_has_its_memory_on_all_ranks_and_its_figures_of_now() -> None:
    row = pool_row(replace(POOL, sessions=2, now=NOW))
    assert row == (
        "host", "ready", "16 GiB", "97.7 %", "25.0 %", "2", "3 MiB/s", "1 MiB/s", "0.5/s", "12.0/s", "2",
        "blocks are dropped instead of stored: 0.5/s",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({}, ""),
        ({"state": "pinning", "reason": "8 of 16 slots"}, ""),
        ({"state": "degraded", "reason": "rank 1 is silent"}, "rank 1 is silent"),
        ({"bypassed": ["load", "store"]}, "an operator bypasses loads and stores"),
        ({"granted_bytes": GIB, "due_bytes": 4 * GIB}, "it has 1 GiB of the 4 GiB that it is due"),
        ({"usable_slots": 0, "slots": SlotCounts(0, 0, 0, 0, 0, 0)}, "no slot is usable yet"),
        ({"usable_slots": 0, "sessions": 0, "slots": SlotCounts(0, 0, 0, 0, 0, 0)}, ""),
        ({"usable_slots": 4, "slots": SlotCounts(0, 2, 0, 1, 0, 1)}, "every slot is in use, so no store finds room"),
        ({"usable_slots": 4, "slots": SlotCounts(0, 2, 1, 1, 0, 0)}, ""),
    ],
)
def test_the_trouble_of_a_pool(changes: dict[str, Any], trouble: str) -> None:
    assert pool_row(replace(POOL, **changes)).trouble == trouble


def test_a_pool_does_not_repeat_the_reason_of_the_server() -> None:
    pool = replace(POOL, state="degraded", reason="rank 1 is silent")
    assert pool_row(pool, told=["rank 1 is silent"]).trouble == ""


def test_a_pool_does_not_repeat_a_bypass_of_all_pools() -> None:
    one, all_of_them = replace(POOL, bypassed=["load"]), BypassStatus(load=True, store=False, ttl_seconds_left=None)
    assert overview(readings([one])).pools[0].trouble
    assert not overview(readings([one], bypass=all_of_them)).pools[0].trouble


def test_ranks_of_several_sessions_are_told_apart() -> None:
    ranks = [replace(RANK, session=session, host="node-7", pid=1, device=None) for session in ("s1", "s2")]
    assert [row.place for row in rank_rows(ranks)] == ["s1, node-7, pid 1", "s2, node-7, pid 1"]
    assert [row.place for row in rank_rows(ranks[:1])] == ["node-7, pid 1"]


def test_transfers_of_several_sessions_are_told_apart() -> None:
    transfers = replace(TRANSFERS, items=[replace(TRANSFER, session="s7")])
    session = replace(SESSION, pool=POOL.name)
    two = readings([POOL], sessions=[session, session], transfers=transfers)
    assert "session s7" in overview(two).oldest[0].note
    assert "session" not in overview(two._replace(sessions=[session])).oldest[0].note


def test_the_row_of_a_session_says_what_it_holds() -> None:
    row = session_row(
        replace(SESSION, leased_slots=3, quarantined_slots=4, in_flight=0, age_seconds=90.0), on_node=True
    )
    assert (row.name, row.state, row.in_flight, row.oldest, row.holds) == (SESSION.id, "attached", "0", "-", "7")
    assert (row.age, row.trouble) == ("1 min", "")


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({"state": "stuck", "oldest_seconds": 45.0, "in_flight": 1}, "its oldest transfer has been in flight for 45 s"),
        ({"state": "lost", "processes": 1, "quarantined_slots": 2}, "2 slots are kept because 1 worker may still copy"),
        ({"state": "lost", "processes": 0}, "its connection has ended"),
        ({"state": "attaching", "ranks": []}, "not all ranks have reported yet"),
        (
            {"state": "attaching", "ranks": [SessionRankView(rank=1, pid=7, device=None, registered_slots=0)]},
            "on rank 1",
        ),
        (
            {
                "state": "attaching",
                "ranks": [SessionRankView(rank=rank, pid=7, device=None, registered_slots=0) for rank in range(64)],
            },
            "no slot is registered yet on 64 ranks",
        ),
    ],
)
def test_the_trouble_of_a_session(changes: dict[str, Any], trouble: str) -> None:
    assert trouble in session_row(replace(SESSION, **changes), on_node=True).trouble


@pytest.mark.parametrize("on_node", [True, False])
def test_an_engine_in_trouble_can_be_detached_only_from_a_node(on_node: bool) -> None:
    row = session_row(replace(SESSION, state="stuck"), on_node=on_node)
    assert (f"kvstow detach {SESSION.id} --kill" in row.trouble) == on_node


# -- the pool that is shown ----------------------------------------------------------------------------------------


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
    broken = replace(RANK, rank=1, error="no more")
    readiness = replace(READINESS, ranks=(RANK, broken))
    given = readings(pools, sessions=sessions, readiness=readiness)
    everything = overview(given)
    assert [row.name for row in everything.sessions] == ["in-a", "in-b"]
    assert "pool" in everything.session_columns
    assert [row.rank for row in everything.ranks] == [1], "of all pools only the ranks in trouble"
    assert (everything.selected, everything.pool) == (None, None)
    chosen = PoolReadings(OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16)).stats(), (RANK,), HISTORY)
    one = overview(given._replace(asked="b", pool=chosen))
    assert [row.name for row in one.sessions] == ["in-b"]
    assert "pool" not in one.session_columns
    assert [row.rank for row in one.ranks] == [RANK.rank]
    assert (one.selected, one.choices, [row.name for row in one.pools]) == ("b", ("a", "b"), ["a", "b"])


def test_a_pool_that_is_gone_is_missing() -> None:
    shown = overview(readings([POOL], asked="gone", pool=None))
    assert (shown.is_missing, shown.selected, shown.choices) == (True, None, ("host",))
    assert not overview(readings([POOL])).is_missing


def test_rows_in_trouble_are_selected_first() -> None:
    rows = [session_row(replace(SESSION, id=str(number)), on_node=True) for number in range(6)]
    rows[4] = rows[4]._replace(trouble="it is stuck")
    assert [row.name for row in select_rows(rows, 3)] == ["0", "1", "4"]
