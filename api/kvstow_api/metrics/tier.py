"""Metric families of the fleet tier, with the labels `TIER`: of each pool, all its namespaces together.

There are none without a store. Counters include what namespaces counted before they ended: an engine that
resets its cache begins another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Metric

from kvstow.tier.tierstatus import TierClient, TierStatus
from kvstow_api.directory import Directory, TierLabels
from kvstow_api.metrics.families import Row, counter, gauge
from kvstow_api.metrics.snapshots import POOL

TIER = ("tier", *POOL)
"""The labels of a pool's tier: the name of the store, the pool, and its model."""

_Values = Sequence[TierStatus]

_GAUGES: tuple[tuple[str, str, Callable[[_Values], float | None]], ...] = (
    (
        "kvstow_tier_up",
        "1 while the tier is on and its breaker closed; 0 also while it is off",
        lambda tiers: float({"on"} <= {one.state for one in tiers} <= {"on", "off"}),
    ),
    (
        "kvstow_tier_breaker_open",
        "1 while the store is left alone because it does not work",
        lambda tiers: float(any(one.breaker != "closed" for one in tiers)),
    ),
    ("kvstow_tier_waiting_blocks", "Blocks that are to be put", lambda tiers: _sum(tiers, "waiting_blocks")),
    ("kvstow_tier_putting_blocks", "Blocks that are being put", lambda tiers: _sum(tiers, "putting_blocks")),
    ("kvstow_tier_fetching_blocks", "Blocks that are being fetched", lambda tiers: _sum(tiers, "fetching_blocks")),
    (
        "kvstow_tier_fetch_bytes_per_second",
        "Measured rate of fetches, on the slowest rank; absent until it is measured",
        lambda tiers: min(_known(one.fetch_bytes_per_second for one in tiers), default=None),
    ),
    (
        "kvstow_tier_lookup_seconds",
        "Measured time of a question to the store; absent until it is measured",
        lambda tiers: max(_known(one.lookup_seconds for one in tiers), default=None),
    ),
    (
        "kvstow_tier_prefill_tokens_per_second",
        "Measured speed of computing prompts; absent until it is measured",
        lambda tiers: min(_known(one.prefill_tokens_per_second for one in tiers), default=None),
    ),
)
_COUNTERS = (
    ("kvstow_tier_requests", "Requests that were not wholly in the pool", "requests"),
    ("kvstow_tier_declined_requests", "Requests for which a fetch did not pay", "declined_requests"),
    ("kvstow_tier_cut_waits", "Requests that went on before all fetches had ended", "cut_waits"),
    ("kvstow_tier_wait_seconds", "Time that requests waited for the store", "wait_seconds"),
    ("kvstow_tier_saved_seconds", "Estimated time to compute what was fetched", "saved_seconds"),
    ("kvstow_tier_found_blocks", "Blocks that the store had and the pool had not", "found_blocks"),
    ("kvstow_tier_fetched_blocks", "Blocks fetched on all ranks", "fetched_blocks"),
    ("kvstow_tier_put_blocks", "Blocks put by all ranks", "put_blocks"),
    (
        "kvstow_tier_dropped_blocks",
        "Blocks that were not put because too many waited or the store was full",
        "dropped_blocks",
    ),
    ("kvstow_tier_breaker_opened", "How often the store was left alone because it did not work", "breaker_opened"),
)
"""Fields of `TierCounters`."""


def tier_families(directory: Directory) -> Iterator[Metric]:
    if directory.tier is None:
        return
    tiers: dict[TierLabels, list[TierStatus]] = {}
    for hosted in directory.tier.tiers():
        tiers.setdefault((hosted.store, hosted.pool, hosted.model), []).append(hosted)
    if not tiers:
        return
    totals = directory.tier.totals()
    for name, text, value in _GAUGES:
        found = [(labels, value(of_pool)) for labels, of_pool in tiers.items()]
        yield gauge(name, text, TIER, [(labels, figure) for labels, figure in found if figure is not None])
    for name, text, field in _COUNTERS:
        rows: list[Row] = [(labels, getattr(one, field)) for labels, one in totals.items()]
        yield counter(name, text, TIER, rows)
    yield counter(
        "kvstow_tier_failed_blocks",
        "Blocks that could not be moved",
        [*TIER, "direction"],
        [
            ((*labels, direction), getattr(one, f"failed_{direction}_blocks"))
            for labels, one in totals.items()
            for direction in ("put", "fetch")
        ],
    )
    for name, text, field in (
        (
            "kvstow_tier_corrupt_objects",
            "Objects that were fetched and were not what was put",
            "corrupt_objects",
        ),
        (
            "kvstow_tier_client_restarts",
            "How often what connects to the store was ended and started again",
            "restarts",
        ),
    ):
        counted = [
            (labels, sum(getattr(one.stats, field) for one in _clients(of_pool))) for labels, of_pool in tiers.items()
        ]
        yield counter(name, text, TIER, counted)


def _sum(tiers: _Values, field: str) -> float:
    return float(sum(getattr(one, field) for one in tiers))


def _known(figures: Iterable[float | None]) -> list[float]:
    return [figure for figure in figures if figure is not None]


def _clients(tiers: _Values) -> Iterator[TierClient]:
    for one in tiers:
        yield from one.clients
