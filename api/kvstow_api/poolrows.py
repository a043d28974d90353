"""The row of a pool on the status page and in `kvstow top`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.messages import Direction
from kvstow_api.numberformat import blocks_per_second, percent, rate
from kvstow_api.views.pools import PoolView

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
    the last seconds. `trouble`: what is wrong with the pool, empty if nothing is."""

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
    trouble: str


assert tuple(POOL_COLUMNS) == PoolRow._fields[:-1]


def pool_row(pool: PoolView, *, told: Collection[str] = ()) -> PoolRow:
    """`told`: troubles that are said of the whole server; a pool does not repeat them."""
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
        trouble="; ".join(trouble for trouble in _troubles(pool) if trouble not in told),
    )


def bypass_trouble(directions: Collection[Direction]) -> str:
    return f"an operator bypasses {' and '.join(f'{direction}s' for direction in directions)}"


def _troubles(pool: PoolView) -> Iterator[str]:
    if pool.state not in ("ready", "pinning"):
        yield pool.reason
    if pool.bypassed:
        yield bypass_trouble(pool.bypassed)
    if pool.granted_bytes < pool.due_bytes:
        yield f"it has {format_size(pool.granted_bytes)} of the {format_size(pool.due_bytes)} that it is due"
    slots = pool.slots
    if pool.sessions and not pool.usable_slots:
        yield "no slot is usable yet"
    elif pool.usable_slots and not slots.free + slots.cached:
        yield "every slot is in use, so no store finds room"
    if pool.now.dropped_blocks_per_second:
        yield f"blocks are dropped instead of stored: {blocks_per_second(pool.now.dropped_blocks_per_second)}"
