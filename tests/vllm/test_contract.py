"""Contract drift: whether vLLM, the installed one and those released, offers what KVStow takes from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import vllm
from tests.vllm.contract.drift import Drift
from tests.vllm.contract.newversion import Place, changes
from tests.vllm.contract.ours import Ours
from tests.vllm.contract.source import Source
from tests.vllm.environments import of_version, sources
from vllm.config import VllmConfig

pytestmark = pytest.mark.vllm

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Installed(NamedTuple):
    root: Path
    version: str


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(Path(__file__).parents[2] / "service")


@pytest.fixture(scope="module")
def installed() -> Installed:
    return Installed(Path(vllm.__file__).parents[1], vllm.__version__)


def test_the_installed_vllm_fits(ours: Ours, installed: Installed) -> None:
    assert Drift(ours, Source(installed.root), installed.version).sentences() == []


@pytest.mark.parametrize("version", [of_version(f"0.{minor}.0") for minor in (26, 28, 30, 31, 32)])
def test_an_older_vllm_fits(ours: Ours, version: str) -> None:
    assert Drift(ours, Source(sources(version)), version).sentences() == []


@pytest.mark.parametrize("uses_v2_runner", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_batches_overlap_where_kvstow_takes_that_for_granted(
    is_async: bool, pipeline: int, uses_v2_runner: bool
) -> None:
    """`VLLMProcess` says it without asking vLLM, whose property is slow."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        use_v2_model_runner=uses_v2_runner,
    )
    assert (VllmConfig.max_concurrent_batches.fget(config) > 1) == (is_async or pipeline > 1)


class Edit(NamedTuple):
    """A change of the installed vLLM's sources, and a part of the sentence that it must cause."""

    module: str
    old: str
    new: str
    sentence: str


EDITS = {
    "a new parameter": Edit(
        BASE,
        "def wait_for_layer_load(self, layer_name: str)",
        "def wait_for_layer_load(self, layer_name: str, step: int)",
        "calls wait_for_layer_load(layer_name, step): KVStowConnector.wait_for_layer_load (connector.py) lacks the "
        "parameter step",
    ),
    "a new keyword": Edit(
        BASE,
        "def has_pending_push_work(self)",
        "def has_pending_push_work(self, *, now)",
        "KVStowConnector.has_pending_push_work (connector.py) lacks the keyword now",
    ),
    "a hook that is gone": Edit(
        BASE,
        "def has_pending_push_work(",
        "def has_work(",
        "the hook has_pending_push_work of KVConnectorBase_V1 is gone",
    ),
    "a hook of a newer version that is gone": Edit(
        BASE,
        "def restore_kv_caches(",
        "def restore(",
        "restore_kv_caches of KVConnectorBase_V1 is gone, and KVStowConnector (connector.py) defines it; we expect it "
        "from 0.33 on",
    ),
    "a new hook": Edit(
        BASE,
        "def has_pending_push_work(",
        "def has_work(",
        "has a hook that is neither ours nor left alone: has_work()",
    ),
    "a new abstract method": Edit(
        BASE,
        "    def has_pending_push_work(self)",
        "    @abstractmethod\n    def must(self): ...\n\n    def has_pending_push_work(self)",
        "KVStowConnector (connector.py) lacks the abstract method must()",
    ),
    "a method becomes a property": Edit(
        BASE,
        "    def has_pending_push_work(self)",
        "    @property\n    def has_pending_push_work(self)",
        "has_pending_push_work is a property",
    ),
    "a class that is gone": Edit(
        BASE, "class SupportsHMA(", "class SupportsHybrid(", "SupportsHMA is gone, and connector.py takes it"
    ),
    "another constructor": Edit(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        "        labelnames: list[str],\n        per_engine_labelvalues: dict[int, list[object]],\n    ):\n"
        "        self._kv_transfer_config",
        "        labelnames: list[str],\n        per_engine_labelvalues: dict[int, list[object]],\n        prefix,\n"
        "    ):\n        self._kv_transfer_config",
        "refuses our super() call: it wants the parameter prefix",
    ),
    "a private attribute of a base class": Edit(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        "self._counter_cls = metric_types",
        "self._counter = metric_types",
        "KVConnectorPromMetrics has no _counter_cls, which KVStowPromMetrics (metricsexport.py) reads",
    ),
    "a method of the block pool": Edit(
        "vllm.v1.core.block_pool",
        "def touch(self, ",
        "def touch(self, request, ",
        "BlockPool.touch calls the parameter blocks request, and we call touch(blocks)",
    ),
    "an attribute of the block pool": Edit(
        "vllm.v1.core.block_pool", "self.null_block", "self.the_null_block", "BlockPool has no null_block"
    ),
    "a field of the scheduler's output": Edit(
        "vllm.v1.core.sched.output",
        "num_scheduled_tokens: dict",
        "num_tokens: dict",
        "SchedulerOutput has no num_scheduled_tokens, which KVStow reads",
    ),
    "a function that we call": Edit(
        "vllm.v1.core.kv_cache_utils",
        "def generate_block_hash_extra_keys(\n    request: Request,",
        "def generate_block_hash_extra_keys(\n    config, request: Request,",
        "it wants the parameter start_mm_idx; kvevents.py calls it",
    ),
    "a class method that we call": Edit(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "def register_connector(cls, name: str, ",
        "def register_connector(cls, owner: str, name: str, ",
        "it wants the parameter class_name; plugin.py calls it",
    ),
    "a field of a class that we make": Edit(
        BASE, "failed_recving: ", "lost_recving: ", "KVConnectorTransferResults has no field failed_recving"
    ),
    "a kind of KV cache": Edit(
        "vllm.v1.kv_cache_interface",
        "class RSWASpec(FullAttentionSpec):",
        "class OddSpec(RSWASpec):\n    pass\n\n\nclass RSWASpec(FullAttentionSpec):",
        "has a kind of KV cache that is neither served nor left out nor refused: OddSpec",
    ),
    "another order of calls": Edit(
        "vllm.v1.worker.gpu.kv_connector",
        "self.kv_connector.handle_preemptions(",
        "self.kv_connector.preempt(",
        "ActiveKVConnector.pre_forward does not call handle_preemptions",
    ),
    "another end of a hit": Edit(
        "vllm.v1.core.sched.scheduler",
        "request.num_computed_tokens = request.num_tokens - 1",
        "request.num_computed_tokens = request.num_tokens - request.block_size",
        "_update_waiting_for_remote_kv does not say `request.num_computed_tokens = request.num_tokens - 1`",
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_change_is_named(ours: Ours, installed: Installed, tmp_path: Path, edit: Edit) -> None:
    path = Path(*edit.module.split(".")).with_suffix(".py")
    text = (installed.root / path).read_text()
    assert edit.old in text
    edited = tmp_path / path
    edited.parent.mkdir(parents=True)
    edited.write_text(text.replace(edit.old, edit.new))
    sentences = Drift(ours, Source(tmp_path, installed.root), installed.version).sentences()
    assert [sentence for sentence in sentences if edit.sentence in sentence], sentences
    assert all(sentence.startswith(f"vLLM {installed.version}") for sentence in sentences)


def test_a_function_that_changes_within_is_shown(ours: Ours, installed: Installed, tmp_path: Path) -> None:
    """Nothing that KVStow calls is missing, so nothing but its text tells that it may do something else."""
    module, old = "vllm.v1.core.block_pool", "block.ref_cnt += 1"
    path = Path(*module.split(".")).with_suffix(".py")
    text = (installed.root / path).read_text()
    assert old in text
    edited = tmp_path / path
    edited.parent.mkdir(parents=True)
    edited.write_text(text.replace(old, "block.ref_cnt += 2") + "\n# another comment\n")
    known, other = Source(installed.root), Source(tmp_path, installed.root)
    assert Drift(ours, other, installed.version).sentences() == []
    changed = {change.place: change.diff for change in changes(ours, known, other)}
    assert changed.keys() == {Place(module, "BlockPool.touch")}
    assert any(line.strip("+ ") == "block.ref_cnt += 2" for line in changed[Place(module, "BlockPool.touch")])
    assert list(changes(ours, known, known)) == []


def test_a_feature_that_comes_too_early_is_named(ours: Ours, installed: Installed) -> None:
    sentences = Drift(ours, Source(installed.root), "0.26.0").sentences()
    assert "vLLM 0.26.0 has KVConnectorBase_V1.get_transfer_results already; we thought that 0.30 introduced it" in (
        sentences
    )
