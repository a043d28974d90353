"""The row of a pool's tier on the status page and in `kvstow top`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvstow_api.numberformat import counted, duration, rate
from kvstow_api.views.tier import TierPoolView

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
    the estimated time to compute what was fetched. `trouble`: what is wrong, empty if nothing is."""

    name: str
    state: str
    fetches: str
    fetching: str
    waiting: str
    put: str
    fetched: str
    waited: str
    saved: str
    trouble: str


assert tuple(TIER_COLUMNS) == TierRow._fields[:-1]


def tier_row(tier: TierPoolView) -> TierRow:
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
        trouble="; ".join(_troubles(tier)),
    )


def loses_time(tier: TierPoolView) -> bool:
    """Whether requests have waited longer than it would have taken to compute what they waited for, so far. Not known
    before the prefill speed is."""
    counters = tier.counters
    return tier.prefill_tokens_per_second is not None and counters.wait_seconds > max(1.0, counters.saved_seconds)


def _troubles(tier: TierPoolView) -> Iterator[str]:
    if tier.state != "on":
        yield tier.reason
    for client in tier.clients:
        if client.state == "failed":
            yield f"{client.purpose} have failed: {client.reason}"
    if corrupt := sum(client.corrupt_objects for client in tier.clients):
        yield f"{counted(corrupt, 'object')} of the store {'was' if corrupt == 1 else 'were'} not what was put"
    if loses_time(tier):
        yield "requests have waited longer for the store than computing would have taken"
