"""The fleet tier as the API shows it."""

from __future__ import annotations

from kvstow_api.directory import Directory
from kvstow_api.tiercontrol import TierBypass
from kvstow_api.views.tier import NO_TIER, TierBypassView, TierPoolView, TierView


def tier_view(directory: Directory) -> TierView:
    """Of all pools. O(pools + clients)."""
    tier = directory.tier
    if tier is None:
        return NO_TIER
    store = tier.store
    return TierView(
        attachable=tier.can_attach,
        store=None if store is None else store.name,
        url=None if store is None else store.url,
        write=None if store is None else store.write,
        bypass=bypass_view(tier.bypass),
        items=[TierPoolView.of(one) for one in tier.tiers()],
    )


def bypass_view(bypass: TierBypass) -> TierBypassView:
    return TierBypassView(bypassed=bypass.bypassed, ttl_seconds_left=bypass.seconds_left)
