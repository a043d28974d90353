"""The row of a pool on the status page and in `kvstow top`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow_api.answers import PoolView
from kvstow_api.numberformat import blocks_per_second, percent, rate

POOL_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "name": "pool",
        "state": "state",
        "memory": "memory",
        "used": "used",
        "hits": "hits",
        "in_flight": "in flight",
        "loads": "loads",
        "stores": "stores",
        "dropped": "dropped",
        "evicted": "evicted",
        "sessions": "sessions",
    }
)
"""Fields of a `PoolRow` and their titles. The most important come first: a narrow terminal omits the last ones."""


class PoolRow(NamedTuple):
    """A pool as text. `memory` is of all ranks, `used` the share of usable slots that are not free; the figures are of
    the last seconds. `troubled`: a condition concerns the pool."""

    name: str
    state: str
    memory: str
    used: str
    hits: str
    in_flight: str
    loads: str
    stores: str
    dropped: str
    evicted: str
    sessions: str
    troubled: bool


assert tuple(POOL_COLUMNS) == PoolRow._fields[:-1]


def pool_row(pool: PoolView, *, troubled: bool = False) -> PoolRow:
    now, pending = pool.now, pool.pending
    used = (pool.usable_slots - pool.slots.free) / pool.usable_slots if pool.usable_slots else None
    return PoolRow(
        name=pool.name,
        state=pool.state,
        memory=format_size(pool.granted_bytes),
        used=percent(used),
        hits=percent(now.hit_ratio),
        in_flight=f"{pending.loads + pending.stores:,}",
        loads=rate(now.load_bytes_per_second),
        stores=rate(now.store_bytes_per_second),
        dropped=blocks_per_second(now.dropped_blocks_per_second),
        evicted=blocks_per_second(now.evicted_blocks_per_second),
        sessions=f"{pool.sessions:,}",
        troubled=troubled,
    )
