from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.engines import Reference
from tests.vllm.models import write_model
from tests.vllm.nodeservice import NodeService, running_service

NEWEST_ONLY = [
    *("test_attachidentity.py", "test_connector.py", "test_parity.py", "test_scheduling*.py", "test_sharing.py"),
    "test_streamedinput.py",
]
"""Files that drive the scheduler of the newest vLLM, without a model (`harness`)."""


def _ignored() -> list[str]:
    """What cannot even be imported."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return ["*.py", "*/*.py"]
    return [] if (Path(vllm.origin).parent / "v1/core/kv_cache_planning.py").is_file() else NEWEST_ONLY


collect_ignore_glob = _ignored()


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", action="store_true", help="run only what docs/compatibility.md has a row for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slowest files come first, so that of several processes none ends long after the others."""
    if config.getoption("--features", default=False):
        from bench.compatibility import VERSIONS, is_of_feature

        names = {item.nodeid.removeprefix("tests/vllm/"): item for item in items}
        items[:] = [item for name, item in names.items() if is_of_feature(name) and not name.startswith(VERSIONS)]
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
def service(tmp_path: Path) -> Iterator[NodeService]:
    """A node service without a store below its pools."""
    with running_service(tmp_path) as service:
        yield service


@pytest.fixture
def config() -> Any:
    """A `VllmConfig` of the newest vLLM whose parts tests may change, in a process whose hashes are reproducible."""
    from tests.vllm.harness.setup import Setup, make_vllm_config
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    made = make_vllm_config(Setup("identity"), "kvstow_service.connectors.vllm", {})
    made.model_config = SimpleNamespace(**vars(made.model_config))  # it is shared by all tests
    made.load_config = SimpleNamespace(load_format="auto")
    return made


@pytest.fixture
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents look for their server where there is none."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """`caplog` hears KVStow once, also where another engine of this process has joined vLLM's log."""
    monkeypatch.setattr(logging.getLogger("kvstow"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("kvstow"), "handlers", [])
