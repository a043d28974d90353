"""Engines of two nodes exchange blocks if their fingerprints are equal: real ones, which read a folder of weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engineprocess import EngineProcess, fingerprint_of
from tests.vllm.engines import SHORT, Setup, running

pytestmark = pytest.mark.vllm

NOWHERE = "unix:/nowhere/attach.sock"


def fingerprint_with(model: Path, settings: Mapping[str, Any]) -> str:
    with running(Setup(model, {"attach": NOWHERE}, gpu_blocks=96, settings=settings)) as engine:
        engine.ask(SHORT[0], tokens=1)
        found = fingerprint_of(engine)
    assert found is not None
    return found


def test_engines_of_two_nodes_have_the_same_fingerprint_unless_something_differs(model: Path, tmp_path: Path) -> None:
    """They are two processes, their models lie elsewhere, and their GPUs have room for different numbers of blocks.
    `test_attachidentity` has all that may differ."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    other = EngineProcess(copy, NOWHERE, tmp_path / "log")
    try:
        other.ask(SHORT[0], tokens=1)
        there = other.fingerprint()
    finally:
        other.kill()
    assert fingerprint_with(model, {}) == there

    assert fingerprint_with(model, {"dtype": "bfloat16"}) != there
