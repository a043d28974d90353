"""The row of a pool, on the status page and in `kvstow top`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.test_doctor import GIB

from kvstow.stats import SlotCounts
from kvstow_api.client.decoding import decode
from kvstow_api.figures import NowView
from kvstow_api.openapi import EXAMPLES
from kvstow_api.poolrows import pool_row
from kvstow_api.views.pools import PoolView

POOL = decode(PoolView, EXAMPLES["PoolView"])
NOW = NowView(
    seconds=10.0,
    hit_ratio=0.25,
    load_bytes_per_second=3 << 20,
    store_bytes_per_second=1 << 20,
    evicted_blocks_per_second=12.0,
    dropped_blocks_per_second=0.5,
)


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
