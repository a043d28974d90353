"""What an engine's blocks are in the store of the fleet tier."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.tier.fingerprint import Fingerprint, fingerprint, named_weights


class TierIdentity:
    """What an engine's blocks are, on every node."""

    def __init__(
        self, pool: PoolIdentity, weights: FleetWeights, make_namespace: Callable[[], NamespaceIdentity]
    ) -> None:
        """`weights`: as they were loaded. `make_namespace` works once vLLM has its block hashes: from the first request
        on."""
        self._pool, self._weights, self._make_namespace = pool, weights, make_namespace

    @cached_property
    def _namespace(self) -> NamespaceIdentity:
        return self._make_namespace()

    def fingerprint(self) -> Fingerprint:
        """From the first request on."""
        return fingerprint(self._pool, self._namespace, self._weights)

    def named(self, weights_id: str) -> Fingerprint:
        """With other weights, that a user calls so on all nodes. From the first request on."""
        return fingerprint(self._pool, self._namespace, named_weights(weights_id, self._namespace.model))
