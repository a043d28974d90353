"""Equal identities share; each field changed alone makes another one, and the difference says which."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from kvstow.attach.identity import (
    GroupIdentity,
    Identity,
    NamespaceIdentity,
    PoolIdentity,
    RegionIdentity,
    difference,
    slug,
)
from kvstow.attach.payloads import JsonObject
from kvstow.errors import InvalidRequestError

POOL = PoolIdentity(
    slot_bytes=(4096, 4096),
    regions=(RegionIdentity("layer.0", 2048, "NHD"), RegionIdentity("layer.1", 2048, "NHD")),
    kv_cache_dtype="bfloat16",
    groups=(GroupIdentity("full", 16, 16),),
    tensor_parallel=2,
    uid=1000,
)
NAMESPACE = NamespaceIdentity(
    model="meta-llama/Llama-3.1-8B-Instruct",
    weights_id="0e9e39f2",
    weights_source="snapshot",
    hash_probe="a1b2c3",
    value_settings=(("quantization", "none"), ("rope", "default")),
)

POOL_CHANGES: dict[str, Any] = {
    "slot_bytes": (4096, 8192),
    "regions": (RegionIdentity("layer.0", 2048, "HND"), RegionIdentity("layer.1", 2048, "NHD")),
    "kv_cache_dtype": "fp8",
    "groups": (GroupIdentity("full", 32, 16),),
    "tensor_parallel": 1,
    "pipeline_parallel": 2,
    "prefill_context_parallel": 2,
    "decode_context_parallel": 2,
    "replicated": True,
    "other_regions": ((1, (RegionIdentity("layer.2", 4096),)),),
    "slot_format": 2,
    "uid": 1001,
}
NAMESPACE_CHANGES: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "weights_id": "0e9e39f3",
    "weights_source": "files",
    "hash_probe": "a1b2c4",
    "value_settings": (("quantization", "fp8"), ("rope", "default")),
    "epoch": 1,
    "unshared": "hashes are random",
}
CHANGES: list[tuple[Any, str, Any]] = [
    *((POOL, field, value) for field, value in POOL_CHANGES.items()),
    *((NAMESPACE, field, value) for field, value in NAMESPACE_CHANGES.items()),
]


def test_every_field_is_tried() -> None:
    assert set(POOL_CHANGES) == {field.name for field in fields(PoolIdentity)}
    assert set(NAMESPACE_CHANGES) == {field.name for field in fields(NamespaceIdentity)}


@pytest.mark.parametrize(("base", "field", "value"), CHANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_field_changed_alone_makes_another_identity(base: Any, field: str, value: Any) -> None:
    other = replace(base, **{field: value})
    assert other.canonical != base.canonical
    assert other.digest != base.digest
    assert other.name("m") != base.name("m")
    said = difference(base, other)
    assert said is not None
    assert said.startswith(field)
    assert "; " not in said


def test_the_difference_names_values_of_both_sides() -> None:
    assert difference(POOL, replace(POOL, uid=1001)) == "uid is 1000 here and 1001 there"
    assert difference(POOL, replace(POOL, slot_bytes=(1,))) == "slot_bytes has 2 entries here and 1 there"
    smaller = replace(POOL, regions=(POOL.regions[0], RegionIdentity("layer.1", 1024, "HND")))
    assert difference(POOL, smaller) == (
        "regions[1] (layer.1): page_bytes is 2048 here and 1024 there, layout is NHD here and HND there"
    )
    renamed = replace(POOL, regions=(POOL.regions[0], RegionIdentity("layer.2", 2048, "NHD")))
    assert difference(POOL, renamed) == "regions[1]: name is layer.1 here and layer.2 there"
    staged, other = (replace(POOL, other_regions=((1, one.regions),)) for one in (POOL, smaller))
    assert difference(staged, other) == (
        "other_regions[0][1][1] (layer.1): page_bytes is 2048 here and 1024 there, layout is NHD here and HND there"
    )
    assert difference(POOL, replace(POOL, groups=(GroupIdentity("full", 32, 16),))) == (
        "groups[0]: block_tokens is 16 here and 32 there"
    )
    unquantized = replace(NAMESPACE, value_settings=(("rope", "default"),))
    assert difference(NAMESPACE, unquantized) == "value_settings: quantization is none here and not set there"
    two = replace(NAMESPACE, model="m", epoch=9)
    assert difference(NAMESPACE, two) == (
        "model is meta-llama/Llama-3.1-8B-Instruct here and m there; epoch is 0 here and 9 there"
    )
    assert difference(POOL, replace(POOL)) is None


@pytest.mark.parametrize("identity", [POOL, replace(POOL, **POOL_CHANGES), NAMESPACE, replace(NAMESPACE, epoch=2)])
def test_an_identity_survives_json(identity: Identity) -> None:
    value = JsonObject(json.loads(json.dumps(identity.to_json())), "hello.pool")
    again: Identity = type(identity).from_json(value)  # type: ignore[attr-defined]
    assert again == identity
    assert again.digest == identity.digest


def test_the_order_of_settings_does_not_matter() -> None:
    turned = replace(NAMESPACE, value_settings=(("rope", "default"), ("quantization", "none")))
    assert turned == NAMESPACE
    assert turned.digest == NAMESPACE.digest


def test_the_digest_is_the_same_in_every_version() -> None:
    """Sessions of two engines meet by it: if this value changes, give the identity another field instead."""
    assert NAMESPACE.digest.hex()[:12] == "2495c2517d7a"


def test_pool_and_namespace_never_have_the_same_bytes() -> None:
    assert b'"identity":"PoolIdentity"' in POOL.canonical
    assert b'"identity":"NamespaceIdentity"' in NAMESPACE.canonical


def test_a_name_is_the_model_and_six_digits() -> None:
    assert POOL.name("meta-llama/Llama-3.1-8B-Instruct") == f"llama-3-1-8b-instruct-{POOL.digest.hex()[:6]}"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/models/My Model/", "my-model"),
        ("Qwen2.5_7B", "qwen2-5-7b"),
        ("模型", "pool"),
        ("", "pool"),
        ("x" * 99, "x" * 40),
    ],
)
def test_a_slug_has_letters_digits_and_hyphens(model: str, expected: str) -> None:
    assert slug(model) == expected


def test_a_missing_field_is_named() -> None:
    value = NAMESPACE.to_json()
    del value["weights_id"]
    with pytest.raises(InvalidRequestError, match=r"hello\.namespace\.weights_id is missing"):
        NamespaceIdentity.from_json(JsonObject(value, "hello.namespace"))
    groups = POOL.to_json() | {"groups": [{"kind": "full", "block_tokens": "16", "hash_tokens": 16}]}
    with pytest.raises(InvalidRequestError, match=r"pool.groups\[0\].block_tokens is '16'; allowed: a whole number"):
        PoolIdentity.from_json(JsonObject(json.loads(json.dumps(groups)), "pool"))
