"""The end of a tier whose ranks are in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstow.control.fleettier import FleetTier
from kvstow.messages import TierCompletion
from kvstow.tier.ranktransfers import RankTransfers

_TURN = 0.001


def end_transfers(
    tier: FleetTier, ranks: Sequence[RankTransfers], complete: Callable[[int, list[TierCompletion]], object]
) -> None:
    """Close the tier and its ranks, and wait until every op has ended: calls to the store that are under way end
    within their timeouts, and what has not begun fails. Nothing touches any slot for the store afterwards.

    On any thread, while the host goes on to step the tier and to take completions, or does not. `complete`: gives a
    rank's completions to the session."""
    tier.close()
    for transfers in ranks:
        transfers.close()
    while tier.traffic.in_flight:
        for rank, op in tier.take_plans():
            ranks[rank].submit(op)  # it fails at once
        for rank, transfers in enumerate(ranks):
            if completions := transfers.take_completions():
                complete(rank, completions)
        time.sleep(_TURN)
