"""The Dockerfile: nothing that hadolint objects to, and the version of the package. Its pins: `tests/test_locks.py`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvstow

ROOT = Path(__file__).parents[2]


@pytest.mark.deploy
def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "not installed: make test-deploy does that"
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_images_and_chart_have_the_version_of_the_package() -> None:
    in_dockerfile = set(re.findall(r"^ARG VERSION=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    chart = yaml.safe_load((ROOT / "helm" / "kvstow" / "Chart.yaml").read_text())
    assert in_dockerfile == {chart["version"]} == {chart["appVersion"]} == {kvstow.__version__}
