"""Everything that vLLM computes from has a verdict, and the identity has what the verdicts say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.vllm.environments import of_version, sources
from tests.vllm.valuesources import FIELDS, FILES, VARIABLES, config_fields, variables, verdicts, without_verdict

from kvstow_service.connectors.engine_core.vllmprocess import _LORA_SETTINGS
from kvstow_service.connectors.vllm import valuesettings
from kvstow_service.connectors.vllm.modelweights import WEIGHTS
from kvstow_service.connectors.vllm.valuesettings import read_model_files

pytestmark = pytest.mark.vllm

_PARTS = {
    "attention_config": "AttentionConfig",
    "cache_config": "CacheConfig",
    "diffusion_config": "DiffusionConfig",
    "ec_transfer_config": "ECTransferConfig",
    "kernel_config": "KernelConfig",
    "load_config": "LoadConfig",
    "mamba_config": "MambaConfig",
    "model_config": "ModelConfig",
    "multimodal_config": "MultiModalConfig",
    "parallel_config": "ParallelConfig",
    "speculative_config": "SpeculativeConfig",
}


VERSIONS = [of_version(f"0.{minor}.0") for minor in (30, 31, 32, 33)]


def with_verdict(table: Mapping[str, str], verdict: str) -> set[str]:
    return set(table.get(verdict, "").split())


@pytest.mark.parametrize("version", VERSIONS)
def test_each_field_and_each_variable_has_a_verdict(version: str) -> None:
    root = sources(version)
    assert {"VllmConfig", "ModelConfig", "CacheConfig"} <= config_fields(root).keys()
    assert len(variables(root)) > 200
    assert not without_verdict(root), "decide whether they change KV, and put them into valuesources.py"


def test_the_identity_has_what_the_verdicts_say() -> None:
    for part, name in _PARTS.items():
        settings = set(valuesettings.FIELDS[part]) - {"calculate_kv_scales"}  # vLLM 0.29 and older
        assert settings == with_verdict(FIELDS[name], "identity"), part
    assert set(valuesettings.FIELDS) - _PARTS.keys() == with_verdict(FIELDS["VllmConfig"], "identity")
    own = {name for name in valuesettings.VARIABLES if name.startswith("VLLM_")}
    assert own == with_verdict(VARIABLES, "identity")
    assert set(_LORA_SETTINGS) == with_verdict(FIELDS["LoRAConfig"], "adapter")


@pytest.mark.parametrize("name", sorted(verdicts(FILES)))
def test_a_file_counts_if_its_verdict_says_so(name: str, tmp_path: Path) -> None:
    digests = set()
    for content in ("one", "other"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        digests.add(read_model_files([tmp_path], processor=True, code=True, loaded_by=0).digest)
    verdict = verdicts(FILES)[name]
    assert len(digests) == (2 if verdict == "identity" else 1)
    if verdict == "weights":
        assert name.endswith(WEIGHTS)
