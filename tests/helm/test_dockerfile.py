"""The Dockerfile: nothing that hadolint objects to, and every dependency pinned."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.test_packaging import needed

import kvstow

ROOT = Path(__file__).parents[2]


@pytest.mark.deploy
def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "not installed: make test-deploy does that"
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


# The Python of the base images.
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_what_the_images_install_is_pinned_to_a_version_that_is_allowed() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = pyproject["project"], pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["build-system"]["requires"], *extras["cli"], *extras["service"], *project["dependencies"]]
    for name, requirements in needed(wanted, IMAGE).items():
        assert name in pins(), f"{name} is not in constraints.txt: make pins"
        assert all(one.specifier.contains(pins()[name]) for one in requirements), requirements


def test_clients_of_tiers_are_pinned_to_versions_that_are_allowed() -> None:
    """Not what they need in turn: they need not be installed here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for one in (Requirement(line) for name in ("redis", "mooncake") for line in extras[name]):
        assert one.specifier.contains(pins()[canonicalize_name(one.name)]), one


def test_images_and_chart_have_the_version_of_the_package() -> None:
    in_dockerfile = set(re.findall(r"^ARG VERSION=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    chart = yaml.safe_load((ROOT / "helm" / "kvstow" / "Chart.yaml").read_text())
    assert in_dockerfile == {chart["version"]} == {chart["appVersion"]} == {kvstow.__version__}
