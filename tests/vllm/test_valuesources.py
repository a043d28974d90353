"""Everything that vLLM computes from has a verdict: it is in the identity, or `valuesources` says why it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.environments import of_version, sources
from tests.vllm.valuesources import FILES, config_fields, field_verdicts, variables, verdicts, without_verdict

from kvstow_service.connectors.engine_core.vllmprocess import _LORA_SETTINGS
from kvstow_service.connectors.vllm.modelweights import WEIGHTS
from kvstow_service.connectors.vllm.valuesettings import read_model_files

pytestmark = pytest.mark.vllm

VERSIONS = [of_version(f"0.{minor}.0") for minor in (30, 31, 32, 33)]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_field_and_each_variable_has_a_verdict(version: str) -> None:
    root = sources(version)
    assert {"VllmConfig", "ModelConfig", "CacheConfig"} <= config_fields(root).keys()
    assert len(variables(root)) > 200
    assert not without_verdict(root), "decide whether they change KV, and put them into valuesources.py"


def test_keys_of_adapters_cover_what_the_verdicts_say() -> None:
    assert set(_LORA_SETTINGS) == {
        name for name, verdict in field_verdicts("LoRAConfig").items() if verdict == "adapter"
    }


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
