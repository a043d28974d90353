"""The Dockerfile: nothing that hadolint objects to, and every dependency pinned."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.mark.deploy
def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "not installed: make test-deploy does that"
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_what_the_images_install_is_pinned_to_a_version_that_is_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    torchless = [line for line in pyproject["project"]["dependencies"] if not line.startswith("torch")]
    wanted = [*pyproject["build-system"]["requires"], *extras["cli"], *extras["service"], *torchless]
    for requirement in map(Requirement, wanted):
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned, f"{requirement.name} is not in constraints.txt: make pins"
        assert requirement.specifier.contains(pinned), requirement


def test_torch_is_the_one_of_the_makefile() -> None:
    (in_makefile,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (in_dockerfile,) = re.findall(r"^ARG TORCH=(\S+)\+cpu$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert in_dockerfile == in_makefile
