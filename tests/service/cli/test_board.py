"""What `kvstow top` shows of the overview of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType
from tests.api.test_conditions import FITS, GIB, LARGER, SESSION
from tests.api.test_conditions import RANK as PLAIN
from tests.service.cli.test_tables import NOW, POOL

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import PendingTransfers
from kvstow.status import MemoryStatus, RankStatus, TransferStatus
from kvstow_api.answers import (
    NO_TIER,
    ConditionView,
    InfoView,
    OverviewView,
    PoolView,
    TransfersView,
    TroubledView,
)
from kvstow_api.figures import CurvesView, headline_of
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.board import board, pool_choices, rank_bars

CURVES = CurvesView(
    pool="host",
    interval_seconds=5.0,
    points={
        "hit_ratio": [0.5, None],
        "load_bytes_per_second": [1024.0, 2048.0],
        "store_bytes_per_second": [None, 4096.0],
    },
)
NO_TROUBLE = TroubledView(pools=[], sessions=[], ranks=[], tiers=[])
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
        "alike": {},
        "troubled": NO_TROUBLE,
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


def drawn(shown: RenderableType, width: int = 160) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(shown)
    return console.export_text()


def screen(given: OverviewView, *, width: int = 160, height: int = 60) -> str:
    return drawn(board(given, None, width=width, height=height, server="unix:/admin.sock"), width)


def line(text: str, start: str) -> str:
    (found,) = [one for one in text.splitlines() if one.startswith(start)]
    return found


def test_a_pool_has_the_curves_and_their_present_values() -> None:
    text = screen(document([replace(POOL, now=NOW, usable_slots=4000)]))
    assert line(text, "kvstow node-7: some/model, test, version 1.2.3, unix:/admin.sock, up ")
    assert line(text, "hit ratio").split() == ["hit", "ratio", "▅", "25.0", "%"]
    assert line(text, "loads").split()[1:] == ["▃▅", "3", "MiB/s"]
    assert line(text, "stores").split()[1:] == ["█", "1", "MiB/s"]
    assert "evicted for capacity: 12.0/s, dropped: 0.5/s" in line(text, "evictions")
    assert "4,000 of 4,096 slots usable, 8 GiB per rank, auto" in line(text, "slots")
    assert "not pinned 96" in text


def condition(**changes: Any) -> ConditionView:
    given = {"name": "n", "severity": "warning", "what": "w", "why": "y", "fix": "f", "evidence": {}}
    return ConditionView(**{**given, **changes})


def styles_of(given: OverviewView, start: str) -> set[str]:
    """The colours of the rows that begin with this name."""
    console = Console(width=200, force_terminal=True, color_system="standard", record=True, file=StringIO())
    console.print(board(given, None, width=200, height=60, server=""))
    return {one.split(start)[0] for one in console.export_text(styles=True).splitlines() if start in one}


def test_rows_that_a_condition_concerns_are_marked() -> None:
    pools = [replace(POOL, name=name) for name in ("first-pool", "second-pool")]
    sessions = [replace(SESSION, id=name, pool="first-pool").summary() for name in ("engine-1", "engine-2")]
    troubled = replace(NO_TROUBLE, pools=["first-pool"], sessions=["engine-1"])
    given = document(pools, sessions=sessions, troubled=troubled)
    yellow = "\x1b[33m"
    for marked, plain in (("first-pool", "second-pool"), ("engine-1", "engine-2")):
        assert any(yellow in one for one in styles_of(given, marked))
        assert not any(yellow in one for one in styles_of(given, plain))


def test_the_reason_is_not_told_twice() -> None:
    reason = "rank 1 is silent"
    degraded = {"state": "degraded", "reason": reason}
    assert reason in screen(document([POOL], **degraded))
    assert reason not in screen(document([POOL], **degraded, conditions=[condition()]))
    assert REASON in screen(document([POOL], conditions=[condition()]))
    assert screen(document([POOL], conditions=[condition(what=REASON)])).count(REASON) == 1


def test_conditions_of_a_kind_are_one_line_with_their_number() -> None:
    text = screen(document([POOL], conditions=[condition(what="it burns"), condition(name="m")], alike={"n": 11}))
    assert line(text, "warning  it burns").endswith("and 11 more like this")
    assert "like this" not in line(text, "warning  w")


def test_kinds_of_conditions_that_do_not_fit_are_counted() -> None:
    kinds = [condition(name=f"n{number}", what=f"kind {number}") for number in range(9)]
    text = screen(document([POOL], conditions=kinds, omitted={"conditions": 2}), height=24)
    assert "kind 0" in text
    assert "and 5 more kinds: `kvstow doctor`" in text


def test_a_terminal_of_100_columns_shows_which_engine_it_is_and_on_which_host() -> None:
    engine, host = "0c9b2b6e-6a0e-4d0c-9c55-6b0e8f7f1a2b", "vllm-decode-7d9f8b6c5d-x2x4z"
    pool = "llama-3-3-70b-instruct-0a1b2c"
    session = replace(SESSION, id="89abcdef01234567", pool=pool, engine=engine, host=host).summary()
    text = screen(document([POOL], sessions=[session]), width=100)
    titles = [title.strip() for title in line(text, "SESSION").split("  ") if title]
    assert titles[:5] == ["SESSION", "STATE", "ENGINE", "HOST", "IN FLIGHT"]
    shown = line(text, "89abcdef01234567").split()
    assert (shown[2][-7:], shown[3][-5:]) == (engine[-7:], host[-5:])


def test_what_the_document_leaves_out_is_counted() -> None:
    sessions = [replace(SESSION, id=f"s{number}").summary() for number in range(2)]
    given = document([POOL], sessions=sessions, omitted={"sessions": 7, "pools": 3})
    assert "and 7 more sessions" in screen(given)
    assert "and 3 more pools" in screen(given)


def test_transfers_of_several_sessions_are_told_apart() -> None:
    transfers = replace(TRANSFERS, items=[replace(TRANSFER, session="s7")])
    session = replace(SESSION, pool=POOL.name).summary()
    two = document([POOL], sessions=[session, session], transfers=transfers)
    assert ", session s7" in screen(two)
    assert ", session s7" not in screen(replace(two, sessions=[session]))


def test_the_memory_of_a_node_has_its_pace_while_it_is_populated() -> None:
    memory = MemoryStatus(8 * GIB, 2 * GIB, populate_bytes_per_second=float(GIB), granted_bytes=GIB)
    words = "2 GiB of 8 GiB populated, 1 GiB/s, about 6 s left, 1 GiB in pools"
    assert words in line(screen(document([POOL], memory=memory)), "memory")
    whole = replace(memory, populated_bytes=8 * GIB)
    assert line(screen(document([POOL], memory=whole)), "memory").endswith("8 GiB, 1 GiB in pools")


# -- the pool that is shown --------------------------------------------------------------------------------------------


def test_the_sessions_of_a_selected_pool_do_not_name_it() -> None:
    pools = [replace(POOL, name=name) for name in ("a", "b")]
    given = document(pools, sessions=[SESSION.summary()], ranks=[RANK])
    assert pool_choices(given) == ["a", "b"]
    assert " POOL " in line(screen(given), "SESSION")
    one = screen(replace(given, selected="b"))
    assert " POOL " not in line(one, "SESSION")
    assert line(one, "▸ ").startswith("▸ b ")
    assert "▸ " not in screen(given)


def test_a_pool_that_is_gone_is_missing() -> None:
    given = document([POOL], is_missing=True, selected=None, stats=None, curve=None)
    assert "there is no pool of the name that you chose" in screen(given)
    assert (pool_choices(given), pool_choices(document([POOL]))) == (["host"], [])


def test_without_a_pool_it_says_how_engines_attach() -> None:
    assert 'vLLM attaches with "attach": "unix:/run/kvstow/attach.sock"' in screen(document([]))


# -- ranks -------------------------------------------------------------------------------------------------------------


def bars(*ranks: RankStatus, most: int = 9, width: int = 160, **given: Any) -> list[str]:
    return [one.rstrip() for one in drawn(rank_bars(ranks, width, most, **given), width).splitlines()]


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
    rank = replace(RANK, host=None, pid=None, device=None, **changes)
    assert bars(rank)[0].endswith(f"  {told}")


def test_no_remaining_time_is_shown_while_pinning_is_paused() -> None:
    rank = replace(RANK, pinned_bytes=2 * GIB, state="pinning", pin_rate_bytes_per_second=GIB / 2)
    assert "left" not in bars(rank, pinning_paused=True)[0]


def test_a_rank_shows_its_host_pid_and_device() -> None:
    assert bars(replace(RANK, host="node-7", pid=4711, device=None))[0].endswith("  node-7, pid 4711")
    assert bars(replace(RANK, host="node-7", pid=4711, device="cuda:1"))[0].endswith("  node-7, pid 4711, cuda:1")


def test_ranks_in_trouble_are_shown_first() -> None:
    ranks = [replace(RANK, rank=number, pinned_bytes=number * GIB) for number in range(6)]
    shown = bars(*ranks, most=4, troubled=[f"{RANK.session}/5"])
    assert [one.split("  ")[0] for one in shown] == ["rank 0", "rank 1", "rank 5", "and 3 more ranks"]


def test_ranks_of_several_sessions_are_told_apart() -> None:
    ranks = [replace(RANK, session=session, host="node-7", pid=1, device=None) for session in ("s1", "s2")]
    assert [one.split("  ")[-1] for one in bars(*ranks)] == ["s1, node-7, pid 1", "s2, node-7, pid 1"]
    assert bars(ranks[0])[0].endswith("  node-7, pid 1")


PROGRESS, PLACE = "280 MiB of 384 MiB, 953.7 KiB/s, 1m 52s left", "node-7, pid 24509, cuda:0"
PINNING = replace(
    RANK,
    state="pinning",
    pinned_bytes=280 << 20,
    target_bytes=384 << 20,
    pin_rate_bytes_per_second=(104 << 20) / 112,
    host="node-7",
    pid=24509,
    device="cuda:0",
)


def test_the_bar_of_a_rank_leaves_room_for_its_place() -> None:
    (shown,) = bars(PINNING, width=110)
    assert "1m 52s left" in shown
    assert shown.endswith(PLACE)


def test_on_a_narrow_terminal_the_place_is_cut() -> None:
    for shown in bars(PINNING, replace(PINNING, rank=1), width=80):
        assert "1m 52s left" in shown
        assert PLACE not in shown


def test_how_loads_went_and_why_is_beside_what_is_in_flight() -> None:
    assert "loads by layer 7 of 1,207 (layer alone 7, async burst 1,200)" in " ".join(screen(document([POOL])).split())


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_have_what_the_next_one_would_add() -> None:
    shown = line(screen(document([POOL], curve=LARGER)), "by size")
    assert "25.0 % now, 34.0 % with 32 GiB, 1h 26m of prefill saved" in shown


def test_without_evidence_there_are_only_words_unless_a_condition_says_them() -> None:
    given = document([POOL], curve=replace(FITS, items=[], advice="too early to tell"))
    assert line(screen(given), "by size").endswith("too early to tell")
    told = condition(name="pool_size", severity="info", pool=FITS.pool)
    assert line(screen(replace(given, conditions=[told])), "by size").split() == ["by", "size"]
    other = replace(told, pool="other")
    assert "too early" in screen(replace(given, conditions=[other]))
