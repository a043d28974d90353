"""Nodes exchange blocks if their fingerprints are equal: whatever changes the bytes of a slot, or the meaning of a key,
changes it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace
from tests.engine.attach.test_identity import NAMESPACE, NAMESPACE_CHANGES, POOL, POOL_CHANGES

from kvstow.attach.hello import Hello
from kvstow.attach.identity import (
    DRAFTER_WEIGHTS,
    FleetWeights,
    GroupIdentity,
    NamespaceIdentity,
    PoolIdentity,
    RegionIdentity,
)
from kvstow.tier.fingerprint import OWN_TENANT, fingerprint, named_weights

WEIGHTS = FleetWeights("commit 0e9e39f2")
OF_ONE_NODE = {
    "uid": "the user of the engines on a node; another node has other users, so the tenant counts instead",
    "model": "a path on some nodes; what names the weights names the model",
    "weights_id": "of this node, from times and inodes; the fleet's stands for it",
    "weights_source": "of this node",
}
"""Fields that change nothing on other nodes, and why."""
WITHOUT = {
    "unshared": "hashes are random",
    "epoch": "weights_changed: ",
}
"""Fields with which there is no fingerprint, and the reason's beginning."""


def value(
    pool: PoolIdentity = POOL,
    namespace: NamespaceIdentity = NAMESPACE,
    weights: FleetWeights = WEIGHTS,
    tenant: str = "ml",
) -> str:
    found = fingerprint(pool, namespace, weights, tenant)
    assert found.value is not None, found.reason
    assert found.reason == ""
    return found.value


def test_every_field_is_tried() -> None:
    names = {field.name for identity in (PoolIdentity, NamespaceIdentity) for field in fields(identity)}
    assert names == POOL_CHANGES.keys() | NAMESPACE_CHANGES.keys()
    assert OF_ONE_NODE.keys() | WITHOUT.keys() < names


@pytest.mark.parametrize("field", [*POOL_CHANGES, *NAMESPACE_CHANGES])
def test_each_field_makes_another_fingerprint_or_none(field: str) -> None:
    pool, namespace = POOL, NAMESPACE
    if field in POOL_CHANGES:
        pool = replace(pool, **{field: POOL_CHANGES[field]})
    else:
        namespace = replace(namespace, **{field: NAMESPACE_CHANGES[field]})
    if field in WITHOUT:
        found = fingerprint(pool, namespace, WEIGHTS, "ml")
        assert found.value is None
        assert found.reason.startswith(WITHOUT[field])
    else:
        assert (value(pool, namespace) == value()) == (field in OF_ONE_NODE)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        *(("regions", {"name": "x"}), ("regions", {"page_bytes": 1024}), ("regions", {"layout": "x"})),
        *(("groups", {"kind": "x"}), ("groups", {"block_tokens": 32}), ("groups", {"hash_tokens": 8})),
        ("groups", {"window": 1024}),
    ],
)
def test_each_field_of_a_region_and_a_group_makes_another_fingerprint(field: str, changed: Any) -> None:
    first, *others = getattr(POOL, field)
    change: dict[str, Any] = {field: (replace(first, **changed), *others)}
    assert value(replace(POOL, **change)) != value()


def test_every_field_of_a_region_and_a_group_is_tried() -> None:
    assert [field.name for field in fields(RegionIdentity)] == ["name", "page_bytes", "layout"]
    assert [field.name for field in fields(GroupIdentity)] == ["kind", "block_tokens", "hash_tokens", "window"]


def test_each_setting_that_changes_values_makes_another_fingerprint() -> None:
    settings = NAMESPACE.value_settings
    found = {value(namespace=replace(NAMESPACE, value_settings=settings[:count])) for count in range(len(settings) + 1)}
    assert len(found) == len(settings) + 1


def test_a_drafters_weights_count_by_their_name_in_the_fleet() -> None:
    """Beside the model's; on each node alone they count by the times of files."""

    def with_drafter(name: str) -> NamespaceIdentity:
        return replace(NAMESPACE, value_settings=(*NAMESPACE.value_settings, (DRAFTER_WEIGHTS, name)))

    assert value(namespace=with_drafter("one")) == value(namespace=with_drafter("another"))
    assert value(weights=FleetWeights("commit 0e9e39f2 and files 17")) != value()


def test_each_tenant_has_fingerprints_of_its_own() -> None:
    names = ("ml", "web", OWN_TENANT, f'ml","weights":"{WEIGHTS.weights_id}')
    assert len({value(tenant=name) for name in names}) == len(names)


def test_users_of_one_tenant_share_and_users_of_none_have_no_fingerprint() -> None:
    assert value(replace(POOL, uid=1001)) == value(replace(POOL, uid=1002))
    found = fingerprint(replace(POOL, uid=1001), NAMESPACE, WEIGHTS, None)
    assert found.value is None
    assert found.reason.startswith("tenant_unknown: ")
    assert "--tenant NAME=1001" in found.reason


def test_without_names_of_the_weights_there_is_no_fingerprint() -> None:
    assert fingerprint(POOL, NAMESPACE, FleetWeights(reason="nobody knows"), "ml") == (None, "nobody knows")
    older = fingerprint(POOL, NAMESPACE, FleetWeights(), "ml")
    assert older.value is None
    assert older.reason.startswith("weights_unknown: ")


def test_the_same_name_of_two_models_names_other_weights() -> None:
    assert named_weights("v2", "/models/llama-8b") == named_weights("v2", "meta/Llama-8B/")
    names = {named_weights(name, model) for name in ("v1", "v2") for model in ("/models/llama", "/models/llama-chat")}
    assert len({value(weights=weights) for weights in names}) == 4


def test_what_crosses_the_wire_has_the_same_fingerprint() -> None:
    """The engine's own, and the one that the node service makes of its hello."""
    hello = Hello(role="scheduler", engine="e", host="h", pid=1, pool=POOL, namespace=NAMESPACE, fleet_weights=WEIGHTS)
    again = Hello.unpack(hello.pack())
    assert again.pool is not None
    assert again.namespace is not None
    assert fingerprint(again.pool, again.namespace, again.fleet_weights, "ml").value == value()


def test_the_fingerprint_is_the_same_in_every_version() -> None:
    """Nodes that are upgraded one by one meet by it. If its value changes, what is in a store is found no more."""
    assert value()[:12] == "f786b7fa1353"
