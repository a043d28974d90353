"""What examples/ names exists, and KVStow takes what they pass to it. The values for clusters: `tests/helm`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from tests.test_docs import take

import kvstow

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
