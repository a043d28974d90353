"""What a vLLM engine says of itself to the node service: each difference that matters makes another identity."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.harness.setup import Setup, make_geometry, make_vllm_config

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow_service.connectors.engine_core.kvgroups import kv_groups
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.vllm import engineidentity, modelweights
from kvstow_service.connectors.vllm.modelpaths import ModelTrails

pytestmark = pytest.mark.vllm

REGIONS = (RegionIdentity("0", 4096, "a"),)


def namespace(config: Any) -> NamespaceIdentity:
    return namespace_of(config, "v1")


def namespace_of(config: Any, weights_id: str | None) -> NamespaceIdentity:
    """Of an engine with one rank, which has loaded what is there now."""
    trails = ModelTrails.of(config)
    model = engineidentity.read_model(config, weights_id)
    return engineidentity.namespace_identity(config, 16, model, [trails.compare(trails)])


def fleet_weights(config: Any, weights_id: str | None) -> FleetWeights:
    return engineidentity.read_model(config, weights_id).fleet_weights


def other_model(config: Any) -> None:
    config.model_config.model = "other"


def other_rope(config: Any) -> None:
    described = config.model_config.hf_config.to_dict() | {"rope_theta": 5e5}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: described)


@pytest.mark.parametrize(
    "change",
    [other_model, other_rope],
)
def test_each_setting_that_changes_values_makes_another_namespace(config: Any, change: Callable[[Any], None]) -> None:
    here = namespace(config)
    change(config)
    assert namespace(config) != here


def test_what_changes_no_value_makes_none(config: Any) -> None:
    here = namespace(config)
    config.model_config.max_model_len = 256
    described = config.model_config.hf_config.to_dict() | {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: described)
    assert namespace(config) == here


def test_the_longest_request_counts_where_rope_depends_on_it(config: Any) -> None:
    described = config.model_config.hf_config.to_dict() | {"rope_scaling": {"rope_type": "longrope"}}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: described)
    here = namespace(config)
    config.model_config.max_model_len = 256
    assert namespace(config) != here


def test_hashes_of_another_algorithm_or_seed_are_other_keys(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    probes = {namespace(config).hash_probe}
    probes.add(engineidentity.hash_probe("sha256_cbor", 16))
    probes.add(engineidentity.hash_probe("sha256", 32))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.BlockHash(sha256("7")))
    probes.add(engineidentity.hash_probe("sha256", 16))
    assert len(probes) == 4


def test_random_hashes_are_shared_with_nobody(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where something else than vLLM sets the hash that a prompt begins with."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.BlockHash(os.urandom(32)))
    here = namespace(config)
    assert here.unshared.startswith("hashes_not_reproducible: ")
    assert here != namespace(config), "not even with an engine that has drawn the same number"


def test_lora_is_shared_only_where_hashes_cover_the_path(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.lora_config = SimpleNamespace()
    assert namespace(config).unshared == ""
    monkeypatch.setattr(engineidentity, "tags_extra_keys", lambda: False)
    assert namespace(config).unshared.startswith("lora_names_not_unique: ")


def test_scales_of_the_first_requests_are_shared_with_nobody(config: Any) -> None:
    config.cache_config = SimpleNamespace(**vars(config.cache_config), calculate_kv_scales=True)
    assert namespace(config).unshared.startswith("kv_scales_not_fixed: ")


def drafter(model: str) -> Any:
    hf_config = SimpleNamespace(to_dict=dict)
    drafts = SimpleNamespace(model=model, revision=None, hf_config=hf_config, dtype="float32")
    return SimpleNamespace(method="eagle", draft_model_config=drafts)


def write_weights(folder: Path, content: str) -> str:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    return str(folder)


def test_weights_have_one_name_in_the_fleet_wherever_they_lie(config: Any, tmp_path: Path) -> None:
    names = set()
    for place, content in (("a", "weights"), ("b", "weights"), ("c", "other weights")):
        config.model_config.model = write_weights(tmp_path / place / "model", content)
        names.add(fleet_weights(config, None))
    assert len(names) == 2
    assert fleet_weights(config, "v1") == FleetWeights("configured v1 of model")


def test_a_drafter_is_named_as_well(config: Any, tmp_path: Path) -> None:
    config.model_config.model = write_weights(tmp_path / "model", "weights")
    alone = fleet_weights(config, "v1").weights_id
    found = {alone}
    for place, content in (("a", "draft"), ("b", "draft"), ("c", "other draft")):
        config.speculative_config = drafter(write_weights(tmp_path / place, content))
        named = fleet_weights(config, "v1").weights_id
        assert named.startswith(f"{alone} and files ")
        found.add(named)
    assert len(found) == 3
    config.speculative_config = drafter(config.model_config.model)  # the model drafts with its own weights
    assert fleet_weights(config, "v1").weights_id == alone
    assert dict(namespace(config).value_settings)["drafter_weights"] == "v1"
    config.speculative_config = drafter("s3://bucket/drafter")
    for reason in (fleet_weights(config, "v1").reason, namespace(config).unshared):
        assert reason.startswith("weights_unknown: nothing identifies the weights of s3://bucket/drafter; take")


def test_weights_without_a_name_in_the_fleet_have_a_reason(config: Any, tmp_path: Path) -> None:
    config.model_config.model = "s3://bucket/model"
    assert fleet_weights(config, None).reason.startswith("weights_unknown: ")
    config.model_config.model = write_weights(tmp_path / "model", "weights")
    config.load_config = SimpleNamespace(load_format="dummy")
    assert "dummy" in fleet_weights(config, None).reason
    assert fleet_weights(config, "v1").weights_id
    config.load_config = SimpleNamespace(load_format="auto")
    assert fleet_weights(config, None).weights_id
    config.lora_config = SimpleNamespace()
    assert fleet_weights(config, "v1").weights_id, "keys name adapters"


def test_weights_that_cannot_be_read_have_a_reason(config: Any, tmp_path: Path) -> None:
    config.model_config.model = write_weights(tmp_path / "model", "weights")

    def fail(path: Path) -> str:
        raise OSError("input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelweights, "digest_of_weights", fail)
        assert "input/output error" in fleet_weights(config, None).reason


def test_dummy_weights_are_others_than_those_of_the_files(config: Any) -> None:
    here = namespace(config)
    config.load_config = SimpleNamespace(load_format="dummy")
    assert namespace(config) != here


def pool(setup: Setup, *hellos: RankHello, replicated: bool = False) -> PoolIdentity:
    config = make_vllm_config(setup, "kvstow_service.connectors.vllm", {})
    geometry = make_geometry(setup, config)
    groups = kv_groups([group.kv_cache_spec for group in geometry.scheduler.kv_cache_groups], geometry.hash_block)
    return engineidentity.pool_identity(config, geometry.scheduler, groups, list(hellos), replicated=replicated)


def hello(rank: int = 0, node: str = "node", regions: tuple[RegionIdentity, ...] = REGIONS) -> RankHello:
    return RankHello(rank, 4096, 0, node, 0, regions)


def test_each_layout_is_another_pool() -> None:
    other = (RegionIdentity("0", 4096, "b"),)
    pools = [
        pool(Setup("one"), hello()),
        pool(Setup("one"), hello(regions=other)),
        pool(Setup("window", layers="window"), hello()),
        pool(Setup("hybrid", layers="hybrid"), hello()),
        pool(Setup("wide", layers="wide hybrid"), hello()),
        pool(Setup("two", ranks=2), hello(), hello(1)),
        pool(Setup("two", ranks=2), hello(), hello(1, regions=other)),
        pool(Setup("two", ranks=2), hello(), hello(1), replicated=True),
    ]
    assert len({each.digest for each in pools}) == len(pools)
    assert pool(Setup("another name", blocks=99), hello()) == pools[0], "the number of GPU blocks does not matter"
