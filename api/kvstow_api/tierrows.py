"""The row of a pool's tier on the status page and in `kvstow top`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvstow.tier.tierstatus import TierStatus
from kvstow_api.numberformat import duration, rate

TIER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "name": "tier",
        "state": "state",
        "fetches": "fetches",
        "fetching": "fetching",
        "waiting": "to put",
        "put": "put",
        "fetched": "fetched",
        "waited": "waited",
        "saved": "saved",
    }
)
"""Fields of a `TierRow` and their titles. The most important come first: a narrow terminal omits the last ones."""


class TierRow(NamedTuple):
    """The tier of a namespace as text. `fetches`: their measured rate. `fetching` and `waiting` count blocks under way
    and to be put; `put` and `fetched`, blocks since the service started. `waited`: by requests for fetches; `saved`:
    the estimated time to compute what was fetched. `troubled`: a condition concerns it."""

    name: str
    state: str
    fetches: str
    fetching: str
    waiting: str
    put: str
    fetched: str
    waited: str
    saved: str
    troubled: bool


assert tuple(TIER_COLUMNS) == TierRow._fields[:-1]


def tier_row(tier: TierStatus, *, troubled: bool = False) -> TierRow:
    counters = tier.counters
    return TierRow(
        name=tier.namespace,
        state=tier.state,
        fetches=rate(tier.fetch_bytes_per_second),
        fetching=f"{tier.fetching_blocks:,}",
        waiting=f"{tier.waiting_blocks:,}",
        put=f"{counters.put_blocks:,}",
        fetched=f"{counters.fetched_blocks:,}",
        waited=duration(counters.wait_seconds),
        saved=duration(counters.saved_seconds),
        troubled=troubled,
    )
