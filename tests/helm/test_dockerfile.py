"""The Dockerfile: nothing that hadolint objects to. Its pins: `tests/test_locks.py`; its version: `tests/publish`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helm.conftest import ROOT


@pytest.mark.deploy
def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "not installed: make test-deploy does that"
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
