"""Every combination of where the cache lies with what changes pods: Kubernetes would take what helm makes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.conftest import CHART, REGISTRY, TryTemplate, containers_of, notes_of, run, values_of
from tests.helm.processes import validated

pytestmark = pytest.mark.deploy

PLACES = {
    "addon": (),
    "addon-node": ("attach.node=true",),
    "addon-sidecar": ("sidecar=true",),
    "engine": ("mode=engine",),
    "engine-node": ("mode=engine", "attach.node=true"),
    "engine-sidecar": ("mode=engine", "sidecar=true"),
    "node": ("mode=node",),
    "node-keeper": ("mode=node", "service.keeper.place=node"),
}
OPTIONS = {
    "huge": ("memory.hugePages=reserved",),
    "keeperless": ("service.keeper.enabled=false",),
    "prepared": ("socket.prepare=false", "pod.user=null"),
    "tier": ("tier.url=mooncake://mooncake-master.mooncake.svc:50051",),
    "tls": ("admin.tls.secretName=stow-tls", "admin.guardReading=true"),
}
NEEDED = (REGISTRY, "engine.model=m")


@pytest.mark.parametrize("place", PLACES)
def test_every_combination_is_valid(try_template: TryTemplate, place: str, tmp_path: Path) -> None:
    rendered: list[dict[str, Any]] = []
    for chosen in product((False, True), repeat=len(OPTIONS)):
        names = [name for name, is_chosen in zip(OPTIONS, chosen, strict=True) if is_chosen]
        if "tier" in names and place not in ("node", "node-keeper", "engine-sidecar", "addon-sidecar"):
            continue  # it has no node service
        sets = [one for name in names for one in OPTIONS[name]]
        result = try_template(*NEEDED, *PLACES[place], *sets)
        assert result.returncode == 0, f"{names}: {result.stderr}"
        manifests = [one for one in yaml.safe_load_all(result.stdout) if one]
        rendered += manifests
        for workload in (one for one in manifests if one["kind"] in ("Deployment", "DaemonSet")):
            volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
            for container in containers_of(workload).values():
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, names
            has_keeper = place in ("node", "engine-sidecar") and "keeperless" not in names
            has_keeper |= workload["metadata"]["name"].endswith("-keeper")
            assert ("kvstow-keeper" in containers_of(workload)) == has_keeper, names
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump_all(rendered))
    validated(tmp_path / "rendered.yaml", "1.33")


def installations(text: str) -> Iterator[list[str]]:
    """The words after `helm install NAME CHART` of each command in it."""
    for command in re.findall(r"helm install \S+ (?:helm/kvstow|<this chart>)(.*?)(?: +#.*|`.*)?$", text, re.MULTILINE):
        yield shlex.split(command)


def test_what_readme_and_notes_tell_to_install_can_be_installed(helm: Path) -> None:
    notes = notes_of(helm, values_of("node-full"))
    commands = [*installations((CHART / "README.md").read_text()), *installations(notes)]
    assert len(commands) == 9
    assert all("socket.folder=/var/run/inference/kvstow,socket.group=2000" in words[1] for words in commands[-2:])
    for words in commands:
        result = run(helm, "template", "test", CHART, *(word for word in words if not word.startswith("--dry-run")))
        assert result.returncode == 0, f"{words}: {result.stderr}"
