"""The environments with other versions of vLLM, which `make test-vllm` creates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def environment(version: str) -> Path:
    """Of vLLM 0.32.0 it is the one that the others take their packages from."""
    return _ROOT / (".venv-vllm" if version == "0.32.0" else f".venv-vllm-{version}")


def python(version: str) -> Path:
    return environment(version) / "bin/python"


def sources(version: str) -> Path:
    """The folder that holds the package `vllm`."""
    (found,) = environment(version).glob("lib/python*/site-packages")
    return found


def of_version(version: str, *rest: object) -> Any:
    """A parameter of a test that is skipped where there is no such environment."""
    is_there = bool([*environment(version).glob("lib/python*/site-packages/vllm")])
    reason = f"no vLLM {version}: make {environment(version).name}/.vllm"
    return pytest.param(version, *rest, marks=pytest.mark.skipif(not is_there, reason=reason))
