"""Transfers in flight, over several pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstow.stats import LOAD_CHOICES, PendingTransfers
from kvstow.status import TransferStatus
from kvstow_api.directory import HostedPool
from kvstow_api.views.transfers import TransfersView, TransferView


def transfers_view(
    pools: Sequence[HostedPool],
    most: int,
    *,
    scanned: int | None = None,
    wanted: Callable[[TransferStatus], bool] | None = None,
) -> TransfersView:
    """The oldest `most` of those that are `wanted`, searched among the oldest `scanned` (by default `most`) of each
    pool."""
    items = [
        TransferView.of(item, pool.name)
        for pool in pools
        for item in pool.facade.transfers(scanned or most)
        if wanted is None or wanted(item)
    ]
    items.sort(key=lambda item: -item.age_seconds)
    stats = [pool.facade.stats().transfers for pool in pools]
    return TransfersView(
        pending=_sum_of([one.pending for one in stats]),
        load_choices={choice: sum(one.choices[choice] for one in stats) for choice in LOAD_CHOICES},
        items=items[:most],
    )


def _sum_of(pending: Sequence[PendingTransfers]) -> PendingTransfers:
    return PendingTransfers(
        loads=sum(one.loads for one in pending),
        stores=sum(one.stores for one in pending),
        load_blocks=sum(one.load_blocks for one in pending),
        store_blocks=sum(one.store_blocks for one in pending),
        load_bytes=sum(one.load_bytes for one in pending),
        store_bytes=sum(one.store_bytes for one in pending),
        oldest_seconds=max((one.oldest_seconds for one in pending), default=0.0),
        stuck=sum(one.stuck for one in pending),
    )
