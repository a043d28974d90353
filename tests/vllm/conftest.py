from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.vllm.engines import Reference
from tests.vllm.models import write_model

# Where there is no vLLM, nothing here can even be imported.
collect_ignore_glob = [] if find_spec("vllm") else ["*.py", "*/*.py"]


SLOWEST = (
    "test_rotation",
    "test_identity_processes",
    "test_versions",
    "test_server",
    "test_attached",
    "test_dataparallel",
    "test_pipeline",
    "test_latentattention",
    "test_scheduling",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files come first, so that of several processes none ends long after the others."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KV cache group, of four layers with full attention."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV cache groups, of two layers each: one attends to all tokens, one to the last 96."""
    return write_model(tmp_path_factory.mktemp("hybrid-model"), hybrid=True)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What vLLM answers without a connector."""
    return Reference()


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """`caplog` hears KVStow once, also where another engine of this process has joined vLLM's log."""
    monkeypatch.setattr(logging.getLogger("kvstow"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("kvstow"), "handlers", [])
