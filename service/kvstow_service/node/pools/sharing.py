"""Why engines of one model share no blocks."""

from __future__ import annotations

from collections.abc import Iterable

from kvstow.attach.identity import NamespaceIdentity, PoolIdentity, difference
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool

_MAX_REASONS = 4


def sharing_off(pool: NodePool, namespace: KnownNamespace, pools: Iterable[NodePool]) -> tuple[str, ...]:
    """Sentences that say why a session in this namespace shares no blocks with others of its model. Empty if it may
    share.

    It may share if the namespace already existed, or if the model has no other namespace, unless its identity forbids
    sharing.
    """
    reasons = dict.fromkeys(filter(None, [namespace.identity.unshared]))
    if reasons or namespace.name in pool.known:
        return tuple(reasons)
    for other in sorted(pools, key=lambda one: one is not pool):
        for known in other.known.values():
            if known.identity.model != namespace.identity.model or known.is_reset:
                continue
            if other is pool:
                reasons[_namespace_reason(namespace.identity, known)] = None
            else:
                reasons[_pool_reason(pool.identity, other)] = None
    return tuple(reasons)[:_MAX_REASONS]


def _namespace_reason(here: NamespaceIdentity, other: KnownNamespace) -> str:
    reason = f"not shared with namespace {other.name}: {difference(here, other.identity)}"
    if here.hash_probe != other.identity.hash_probe:
        reason += "; the engines hash tokens differently: give all of them the same PYTHONHASHSEED and hash algorithm"
    return reason


def _pool_reason(here: PoolIdentity, other: NodePool) -> str:
    if here.uid != other.identity.uid:
        return f"not shared with pool {other.name}: its engines run as another user"
    return f"not shared with pool {other.name}: {difference(here, other.identity)}"
