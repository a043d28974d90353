"""The fleet tier as the API shows it."""

from __future__ import annotations

from kvstow_api.directory import Directory
from kvstow_api.views.tier import NO_TIER, TierPoolView, TierView


def tier_view(directory: Directory) -> TierView:
    """Of all pools. O(pools + clients)."""
    tier = directory.tier
    if tier is None:
        return NO_TIER
    return TierView(store=tier.store, url=tier.url, items=[TierPoolView.of(one) for one in tier.tiers()])
