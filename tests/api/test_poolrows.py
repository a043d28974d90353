"""The row of a pool, on the status page and in `kvstow top`."""

from __future__ import annotations

from dataclasses import replace

from kvstow_api.answers import PoolView
from kvstow_api.client.decoding import decode
from kvstow_api.figures import NowView
from kvstow_api.openapi import EXAMPLES
from kvstow_api.poolrows import pool_row

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
        False,
    )  # fmt: skip
