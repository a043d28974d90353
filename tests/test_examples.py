"""What examples/ names exists, and KVStow takes what they pass to it. The values for clusters: `tests/helm`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.test_docs import take

import kvstow
from kvstow_service.connectors.engine_core.options import ConnectorOptions

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "examples" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_images_are_those_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    built = {name: one["build"] for name, one in SERVICES.items() if "build" in one}
    assert {(ROOT / "examples" / one["context"]).resolve() for one in built.values()} == {ROOT}
    assert {one["target"] for one in built.values()} <= targets
    assert {one["image"].rpartition(":")[2] for one in SERVICES.values()} == {kvstow.__version__}


def test_the_node_takes_its_command() -> None:
    take(" ".join(SERVICES["node"]["command"]).replace("${KVSTOW_MEMORY:-32GiB}", "32GiB"))


def test_vllm_attaches_where_the_node_listens() -> None:
    command = SERVICES["vllm"]["command"]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    listens = SERVICES["node"]["command"][-1]
    assert config["kv_connector_extra_config"] == {"attach": f"unix://{listens}"}
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
    folder = f":{Path(listens).parent}"
    assert all(any(one.endswith(folder) for one in SERVICES[name]["volumes"]) for name in ("socket", "node", "vllm"))


def test_the_folder_belongs_to_the_user_of_the_images() -> None:
    (user,) = set(re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE))
    assert f"chown {user} /run/kvstow && chmod 0750" in SERVICES["socket"]["entrypoint"][-1]
    assert user in SERVICES["models"]["entrypoint"]


def test_only_what_prepares_folders_is_root() -> None:
    for name, one in SERVICES.items():
        assert one["cap_drop"] == ["ALL"], name
        assert ("user" in one) == (name in ("socket", "models")), name


@pytest.mark.parametrize(("program", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_nixl_comes_before_kvstow_and_each_has_its_role(program: str, role: str) -> None:
    text = (ROOT / "examples" / "disaggregation" / f"{program}.sh").read_text()
    config = json.loads(re.findall(r"--kv-transfer-config '(.*)'", text, re.DOTALL)[0])
    nixl, ours = config["kv_connector_extra_config"]["connectors"]
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    assert (nixl["kv_connector"], nixl["kv_role"]) == ("NixlConnector", role)
    assert (ours["kv_connector"], ours["kv_role"]) == ("KVStowConnector", "kv_both")
    ConnectorOptions.parse(ours["kv_connector_extra_config"])


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "upstream").glob("*.md")), ids=lambda path: path.stem)
def test_what_is_drafted_for_others_is_taken(path: Path) -> None:
    text = path.read_text()
    parsed = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert None not in parsed
    configs = [
        json.loads(each) for each in re.findall(r"'(\{\s*\"kv_connector\".*?\})'$", text, re.DOTALL | re.MULTILINE)
    ]
    assert configs
    for config in configs:
        assert config["kv_connector_module_path"] == "kvstow_service.connectors.vllm"
        assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
        ConnectorOptions.parse(config["kv_connector_extra_config"])
    for command in re.findall(r"^(?:kvstow|  command: \"kvstow|verify: \"kvstow) ([^&\"\n]+)", text, re.MULTILINE):
        take(command)
