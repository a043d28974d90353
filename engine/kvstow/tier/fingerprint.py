"""Fingerprints, which say what an engine's blocks are on every node. Nodes whose engines have the same fingerprint
exchange blocks."""

from __future__ import annotations

import hashlib
import json
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvstow.attach.identity import DRAFTER_WEIGHTS, FleetWeights, NamespaceIdentity, PoolIdentity, slug

WEIGHTS_CHANGED: Final = "weights_changed: the engine has reset its cache, and nothing names its weights; restart it"
"""Why a session has no fingerprint after it was reset."""
OWN_TENANT: Final = ""
"""The tenant of engines that run as the service's own user, where no tenants are named."""
_DIGITS = 32


class Fingerprint(NamedTuple):
    """`value` is 32 hex digits, or None if other nodes cannot know these blocks. Then `reason` says why: a code, a
    colon and a sentence."""

    value: str | None
    reason: str = ""


def fingerprint(
    pool: PoolIdentity, namespace: NamespaceIdentity, weights: FleetWeights, tenant: str | None
) -> Fingerprint:
    """Return the fingerprint of an engine's blocks. `weights` replaces what `namespace` says of the weights, which is
    valid on one node only: the model's path and the digest of its files' times, and those of a drafter. `tenant`
    replaces the pool's uid, because a uid may be another person on another node. It is None if no tenant of this node
    has the uid. Then there is no fingerprint, because other nodes do not know the owner of the blocks.
    """
    if tenant is None:
        return Fingerprint(
            None,
            f"tenant_unknown: no tenant of this node has uid {pool.uid}, as which the engine runs; to let it share "
            f"beyond the node, start the services with --tenant NAME={pool.uid}",
        )
    if namespace.unshared:
        return Fingerprint(None, namespace.unshared)
    if namespace.epoch:
        return Fingerprint(None, WEIGHTS_CHANGED)
    if not weights.weights_id:
        return Fingerprint(None, weights.reason or "weights_unknown: this engine does not name its weights; update it")
    settings = tuple([(name, value) for name, value in namespace.value_settings if name != DRAFTER_WEIGHTS])
    everywhere = replace(namespace, model="", weights_id="", weights_source="", value_settings=settings)
    parts = {
        "fingerprint": 1,
        "tenant": tenant,
        "weights": weights.weights_id,
        "pool": replace(pool, uid=None).canonical_value(),
        "namespace": everywhere.canonical_value(),
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    return Fingerprint(hashlib.sha256(canonical).hexdigest()[:_DIGITS])


def named_weights(weights_id: str, model: str) -> FleetWeights:
    """Return the weights to which a user has given this id on all nodes. `model` is `NamespaceIdentity.model`. Its last
    part tells two models apart that get the same id, such as `v2`. The rest is left out, because paths differ between
    nodes."""
    return FleetWeights(f"configured {weights_id} of {slug(model)}")
