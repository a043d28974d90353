"""What vLLM computes from besides tokens and weights: a difference makes another identity, here and in the fleet, and
what is uncertain is shared with nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.service.connectors.engine_core import releases
from tests.service.connectors.engine_core.releases import (
    in_hub,
    rename,
    rename_above,
    rename_and_back,
    switch,
    switch_and_back,
)
from tests.vllm.engines import eventually, start_at

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.tier.fingerprint import fingerprint
from kvstow_service.connectors.vllm import engineidentity, valuesettings
from kvstow_service.connectors.vllm.modelpaths import ModelTrails

pytestmark = pytest.mark.vllm

LATER = 1e12
POOL = PoolIdentity(slot_bytes=(64,), regions=(RegionIdentity("0", 64, "a"),), kv_cache_dtype="auto", groups=())
FIELDS = [
    (part, name)
    for part, names in valuesettings.FIELDS.items()
    for name in names or ("",)
    if name != "calculate_kv_scales"  # switches sharing off
]


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has started after all that a test writes, unless it says otherwise."""
    start_at(monkeypatch, LATER)


def released(config: Any, folder: Path) -> Path:
    """Have the model lie where a release tool keeps it. Each version has other weights, of the same sizes and
    times."""

    def write(place: Path, name: str) -> None:
        file = Path(write_model(place)) / "model.safetensors"
        file.write_text(f"weights {name}")
        os.utime(file, ns=(10**18, 10**18))

    config.model_config.model = config.model_config.tokenizer = str(folder / "current")
    return releases.released(folder, write)


def replace_file(folder: Path) -> None:
    """A hard link to the old file takes the place of the new one."""
    (folder / "hard").hardlink_to(folder / "v1" / "model.safetensors")
    (folder / "hard").rename(folder / "v2" / "model.safetensors")


def overwrite(folder: Path) -> None:
    """Through another hard link, with the same size and the old times."""
    (folder / "hard").hardlink_to(folder / "v2" / "model.safetensors")
    (folder / "hard").write_text("weights v1")
    os.utime(folder / "hard", ns=(10**18, 10**18))


def add_file(folder: Path) -> None:
    (folder / "v2" / "more.safetensors").write_text("weights")


@pytest.fixture
def config(config: Any, tmp_path: Path) -> Any:
    """The model lies in a folder."""
    made = config
    made.model_config.model = made.model_config.tokenizer = write_model(tmp_path / "model")
    made.model_config.hf_config_path = made.model_config.multimodal_config = made.model_config.revision = None
    made.model_config.trust_remote_code = False
    return made


FILES = {
    "model.safetensors": "weights",
    "preprocessor_config.json": "{}",
    "modeling_model.py": "pass",
    "tokenizer.json": "{}",
    "quantize_config.json": "{}",
}


def write_model(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return str(folder)


def namespace(
    config: Any,
    weights_id: str | None = None,
    *,
    while_loading: Callable[[], object] = lambda: None,
    afterwards: Callable[[], object] = lambda: None,
) -> NamespaceIdentity:
    """Of an engine with one rank. Something may happen while vLLM loads the weights, or when it has."""
    before = ModelTrails.of(config)
    while_loading()
    loaded = before.compare(ModelTrails.of(config))
    afterwards()
    model = engineidentity.read_model(config, weights_id)
    return engineidentity.namespace_identity(config, 16, model, [loaded])


def fleet(config: Any) -> str | None:
    return fingerprint(POOL, namespace(config, "v1"), FleetWeights("v1"), "").value


def of_images(config: Any, **settings: Any) -> Any:
    config.model_config.multimodal_config = SimpleNamespace(**settings)
    return config


def assert_differs(config: Any, change: Callable[[], object]) -> None:
    """On this node and in the fleet."""
    here, there = namespace(config, "v1"), fleet(config)
    assert not here.unshared
    assert (here, there) == (namespace(config, "v1"), fleet(config)), "it does not change by itself"
    change()
    assert not namespace(config, "v1").unshared
    assert namespace(config, "v1") != here
    assert fleet(config) != there


@pytest.mark.parametrize(("part", "name"), FIELDS, ids=lambda value: value or "all")
def test_each_setting_makes_another_identity(config: Any, part: str, name: str, tmp_path: Path) -> None:
    scales = tmp_path / "scales"
    scales.write_text("1")
    if part == "multimodal_config":
        of_images(config, mm_encoder_fp8_scale_path=None)
    owner = config.model_config if part == "multimodal_config" else config
    section: Any = getattr(owner, part, None)
    value = {"mm_encoder_fp8_scale_path": str(scales)}.get(name, "other")
    if name == "mm_encoder_attn_dtype":
        value, section.mm_encoder_fp8_scale_path = "fp8", str(scales)

    def change() -> None:
        kept = {} if section is None else {key: getattr(section, key) for key in dir(section) if key in _known(part)}
        kept |= vars(section) if section is not None and hasattr(section, "__dict__") else {}
        setattr(owner, part, SimpleNamespace(**{**kept, name: value}) if name else {"setting": 1})

    assert_differs(config, change)


def _known(part: str) -> tuple[str, ...]:
    return (*valuesettings.FIELDS[part], "prefix_caching_hash_algo", "load_format")


@pytest.mark.parametrize("name", valuesettings.VARIABLES)
def test_each_variable_makes_another_identity(config: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert_differs(config, lambda: monkeypatch.setenv(name, "1"))


def test_what_a_file_of_scales_says_counts(config: Any, tmp_path: Path) -> None:
    scales = tmp_path / "scales"
    scales.write_text("1")
    of_images(config, mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    assert_differs(config, lambda: scales.write_text("2"))
    scales.unlink()
    assert namespace(config).unshared.startswith("files_unknown: ")


def test_the_drafters_configuration_counts(config: Any) -> None:
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 1})
    drafts = SimpleNamespace(model=config.model_config.model, revision=None, hf_config=hf_config, dtype="float32")
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=drafts)
    assert_differs(config, lambda: setattr(hf_config, "to_dict", lambda: {"layers": 2}))


# -- files ----------------------------------------------------------------------------------------------------------


def edit(config: Any, name: str) -> None:
    (Path(config.model_config.model) / name).write_text("edited")


def test_the_processors_files_count_where_there_is_one(config: Any) -> None:
    here = namespace(config, "v1")
    edit(config, "preprocessor_config.json")
    edit(config, "modeling_model.py")
    assert namespace(config, "v1") == here, "a model of text has no processor, and this one no remote code"
    of_images(config)
    assert_differs(config, lambda: (Path(config.model_config.model) / "preprocessor_config.json").write_text("again"))
    here = namespace(config, "v1")
    edit(config, "tokenizer.json")
    edit(config, "modeling_model.py")
    assert namespace(config, "v1") == here


def test_remote_code_counts_where_it_is_trusted(config: Any) -> None:
    config.model_config.trust_remote_code = True
    assert_differs(config, lambda: edit(config, "modeling_model.py"))


def test_quantization_counts(config: Any) -> None:
    assert_differs(config, lambda: edit(config, "quantize_config.json"))


def test_a_tokenizer_elsewhere_counts_for_the_processor(config: Any, tmp_path: Path) -> None:
    of_images(config)
    config.model_config.tokenizer = write_model(tmp_path / "tokenizer")
    file = Path(config.model_config.tokenizer) / "processor_config.json"
    assert_differs(config, lambda: file.write_text("{}"))


def test_files_are_the_same_on_another_node(config: Any, tmp_path: Path) -> None:
    of_images(config)
    here = fleet(config)
    config.model_config.model = config.model_config.tokenizer = write_model(tmp_path / "elsewhere" / "model")
    assert fleet(config) == here


def test_files_that_are_newer_than_vllm_are_shared_with_nobody(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_images(config)
    written = max(file.stat().st_ctime for file in Path(config.model_config.model).iterdir())
    start_at(monkeypatch, written - 1)
    assert namespace(config, "v1").unshared.startswith("files_changed: ")
    assert namespace(config, "v1") != namespace(config, "v1")
    assert fleet(config) is None
    start_at(monkeypatch, written + 1)
    assert namespace(config, "v1").unshared == ""


@pytest.mark.parametrize("change", [switch, rename])
def test_files_behind_a_link_that_is_newer_than_vllm_are_shared_with_nobody(
    config: Any, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The processes that answer requests may have read the processor's files before ranks load weights."""
    of_images(config)
    folder = released(config, tmp_path / "models")
    assert namespace(config, "v1").unshared == ""
    started = max(os.lstat(place).st_ctime for place in (folder, folder / "v1", folder / "current")) + 0.02
    with pytest.MonkeyPatch.context() as patch:
        start_at(patch, started)
        assert namespace(config, "v1").unshared == ""
        eventually(lambda: time.time() > started + 0.02, "a later time of the file system")
        change(folder)
        assert namespace(config, "v1").unshared.startswith("files_changed: ")


def test_files_that_cannot_be_read_are_shared_with_nobody(config: Any) -> None:
    of_images(config)
    config.model_config.tokenizer = "org/absent"
    assert "org/absent is neither a folder" in namespace(config, "v1").unshared
    config.model_config.tokenizer = config.model_config.model
    os.truncate(Path(config.model_config.model) / "preprocessor_config.json", 65 << 20)
    assert namespace(config, "v1").unshared.startswith("files_unknown: ")


def test_code_of_another_repository_must_be_a_commit(config: Any) -> None:
    model = config.model_config
    model.trust_remote_code, model.code_revision = True, None
    described = dict(model.hf_config.to_dict())
    model.hf_config = SimpleNamespace(to_dict=lambda: described, auto_map={"AutoModel": "org/code--modeling.Model"})
    assert namespace(config, "v1").unshared.startswith("files_unknown: the model's code comes from another")
    model.code_revision = "0" * 40
    assert namespace(config, "v1").unshared == ""
    model.hf_config.auto_map, model.code_revision = {"AutoModel": f"{model.model}--modeling.Model"}, None
    assert namespace(config, "v1").unshared == "", "vLLM names the model itself in this way"
    processor = Path(model.model) / "processor_config.json"
    processor.write_text('{"auto_map": {"AutoProcessor": "org/code--processing.Processor"}}')
    of_images(config)
    assert namespace(config, "v1").unshared.startswith("files_unknown: ")


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [switch_and_back, rename_and_back])
def test_what_was_there_while_vllm_loaded_is_shared_with_nobody(
    config: Any, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = released(config, tmp_path / "models")
    assert namespace(config, while_loading=lambda: change(folder)).unshared.startswith("files_changed: ")


@pytest.mark.parametrize("moment", ["while_loading", "afterwards"])
@pytest.mark.parametrize("change", [switch, rename, rename_above, replace_file, overwrite, add_file])
def test_what_is_put_behind_the_path_of_the_weights_is_shared_with_nobody(
    config: Any, tmp_path: Path, change: Callable[[Path], None], moment: str
) -> None:
    """The engine may have loaded either. Nothing of it is newer than its start."""
    folder = released(config, tmp_path / "models")
    released(config, folder / "other")
    config.model_config.model = config.model_config.tokenizer = str(folder / "current")
    assert namespace(config).unshared == ""
    happens: Any = {moment: lambda: change(folder)}
    changed = namespace(config, **happens)
    assert changed.unshared.startswith("files_changed: ")
    assert changed != namespace(config), "which has loaded what is there now"
    assert namespace(config).unshared == ""


def test_a_name_that_a_user_gives_does_not_depend_on_links(config: Any, tmp_path: Path) -> None:
    folder = released(config, tmp_path / "models")
    (folder / "v1" / "quantize_config.json").unlink()  # these files count beside any name
    (folder / "v2" / "quantize_config.json").unlink()
    assert namespace(config, "v1", afterwards=lambda: switch(folder)).unshared == ""


def test_what_no_rank_has_seen_is_shared_with_nobody(config: Any) -> None:
    model = engineidentity.read_model(config, None)
    unseen = engineidentity.namespace_identity(config, 16, model, [None])
    assert unseen.unshared.startswith("loading_unseen: it is unknown which files rank 0 has loaded (KVStow's plugin")
    trails = ModelTrails.of(config)
    failed = trails.compare(trails)._replace(problem="OSError: input/output error")
    assert "input/output error" in engineidentity.namespace_identity(config, 16, model, [failed]).unshared


def test_each_rank_must_have_loaded_the_same(config: Any, tmp_path: Path) -> None:
    folder = released(config, tmp_path / "models")
    first = ModelTrails.of(config)
    switch(folder)
    second = ModelTrails.of(config)
    loaded = [first.compare(first), second.compare(second)]
    identity = engineidentity.namespace_identity(config, 16, engineidentity.read_model(config, None), loaded)
    assert "rank 0" in identity.unshared


def test_one_folder_is_one_model_however_its_path_is_spelled(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released(config, tmp_path / "models")
    monkeypatch.chdir(folder)
    found = set()
    for path in (folder / "current", folder / "v2", f"{folder}/v1/../v2/", "current"):
        config.model_config.model = config.model_config.tokenizer = str(path)
        found.add((namespace(config), engineidentity.read_model(config, None).fleet_weights))
    assert len(found) == 1
    config.model_config.model = str(folder / "v1")
    assert namespace(config) not in {each for each, _ in found}


def names_of(config: Any, path: Path) -> tuple[str, str, str]:
    """What the weights at a path are called: on the node, by people, and in the fleet."""
    config.model_config.model = str(path)
    found = engineidentity.read_model(config, None)
    assert found.weights.source == "snapshot"
    return found.weights.weights_id, found.weights.model, found.fleet_weights.weights_id


@pytest.mark.parametrize("names", [("checkpoint-1000", "checkpoint-2000"), ("m-Q4_K_M.gguf", "m-Q8_0.gguf")])
@pytest.mark.parametrize("real", [False, True], ids=["blobs", "real files"])
def test_a_commit_names_no_model(config: Any, tmp_path: Path, names: tuple[str, str], real: bool) -> None:
    """A repository has several: in folders, or in files."""
    weights = [name if name.endswith(".gguf") else f"{name}/model.safetensors" for name in names]
    snapshot = in_hub(tmp_path, "1" * 40, {weights[0]: "some weights", weights[1]: "more weights"})
    if real:
        for name in weights:
            content = (snapshot / name).read_text()
            (snapshot / name).unlink()
            (snapshot / name).write_text(content)
    first, second = (names_of(config, snapshot / name) for name in names)
    assert not set(first) & set(second)
    assert first[1] == f"org/name/{names[0]}"


def test_files_of_the_hub_are_known_without_their_times(config: Any, tmp_path: Path) -> None:
    files = {"model.safetensors": "weights", "config.json": "{}"}
    here, there = (in_hub(tmp_path / place, "1" * 40, files) for place in ("here", "there"))
    assert names_of(config, here) == names_of(config, there)
    other = in_hub(tmp_path / "other", "1" * 40, {**files, "config.json": "{ }"})
    assert names_of(config, other)[0] != names_of(config, here)[0]


@pytest.mark.parametrize("leads", ["out of the blobs", "to a real file"])
def test_a_real_file_in_a_snapshot_is_known_by_its_content(config: Any, tmp_path: Path, leads: str) -> None:
    snapshot = in_hub(tmp_path, "1" * 40, {"model.safetensors": "weights"})
    file, seen = snapshot / "model.safetensors", {names_of(config, snapshot)}
    for content in ("weights", "WEIGHTS"):
        file.unlink()
        if leads == "to a real file":
            file.write_text(content)
        else:
            (tmp_path / content).write_text(content)
            file.symlink_to(tmp_path / content)
        os.utime(file, ns=(10**18, 10**18))
        seen.add(names_of(config, snapshot))
    assert len(seen) == 3


def test_what_vllm_downloads_while_it_loads_is_shared(config: Any, cache: Path) -> None:
    """It finds the configuration before that."""
    config.model_config.trust_remote_code = True
    snapshot = in_hub(cache, "2" * 40, {"config.json": "{}"}, is_main=True)
    more = {"model.safetensors": "weights", "more/model.py": "pass"}
    downloaded = namespace(config, while_loading=lambda: in_hub(cache, "2" * 40, more))
    assert (downloaded.unshared, downloaded.weights_source) == ("", "snapshot")
    real = snapshot / "second.safetensors"
    assert namespace(config, while_loading=lambda: real.write_text("weights")).unshared.startswith("files_changed: ")


def test_code_of_workers_may_change_weights(config: Any) -> None:
    config.parallel_config = SimpleNamespace(**vars(config.parallel_config))
    config.parallel_config.worker_extension_cls = "package.Extension"
    assert namespace(config).unshared.startswith("weights_not_fixed: worker_extension_cls")
    assert namespace(config, "v1").unshared == ""


def test_development_mode_changes_nothing(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm bench` sets it."""
    here = namespace(config)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert namespace(config) == here


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_a_drafter_without_a_model_changes_nothing(config: Any, method: str) -> None:
    here = namespace(config)
    model = config.model_config  # vLLM names the model itself
    config.speculative_config = SimpleNamespace(method=method, draft_model_config=model, parallel_drafting=True)
    assert namespace(config) == here


def test_weights_that_were_replaced_with_their_old_times_are_others(config: Any) -> None:
    here = namespace(config)
    file = Path(config.model_config.model) / "model.safetensors"
    stat = file.stat()
    file.write_text("WEIGHTS")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (stat.st_mtime_ns, stat.st_ino)
    assert namespace(config) != here


@pytest.fixture
def cache(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub, with a snapshot of org/name, which is the model."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    move(cache, "1" * 40)
    config.model_config.model = config.model_config.tokenizer = "org/name"
    config.model_config.revision = None
    return cache


def move(cache: Path, commit: str, weights: str = "weights") -> None:
    in_hub(cache, commit, {**FILES, "model.safetensors": weights}, is_main=True)


def test_a_snapshot_is_what_is_in_it(config: Any, cache: Path) -> None:
    here = namespace(config)
    assert (here.model, here.weights_source, here.unshared) == ("org/name", "snapshot", "")
    move(cache, "2" * 40)
    assert namespace(config) == here, "a commit with the same weights"
    move(cache, "3" * 40, "other weights")
    assert namespace(config).weights_id != here.weights_id
    config.model_config.revision = "1" * 40
    assert namespace(config) == here


def test_a_revision_that_has_moved_is_shared_with_nobody(
    config: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = config.model_config.hf_config.to_dict()
    read = SimpleNamespace(to_dict=lambda: described)
    config.model_config.hf_config = SimpleNamespace(**vars(read), _commit_hash="1" * 40)
    assert namespace(config).unshared == ""
    move(cache, "2" * 40, "other weights")
    assert namespace(config).unshared.startswith("revision_moved: revision main of org/name")
    config.model_config.hf_config = read
    assert namespace(config).unshared == "", "the reference is older than vLLM"
    start_at(monkeypatch, 1.0)
    assert namespace(config).unshared.startswith("revision_moved: ")
    config.model_config.revision = "2" * 40
    assert namespace(config).unshared == "", "a commit does not move"


def test_weights_come_from_the_folder_that_vllm_downloads_to(config: Any, cache: Path, tmp_path: Path) -> None:
    config.load_config = SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "other"))
    assert namespace(config).unshared.startswith("weights_unknown: ")
    move(tmp_path / "other", "3" * 40)
    assert namespace(config).weights_source == "snapshot"


def test_modelscope_means_other_repositories(config: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    assert namespace(config).unshared.startswith("weights_unknown: ")


def test_a_format_that_may_load_other_weights_needs_a_name(config: Any) -> None:
    config.load_config = SimpleNamespace(load_format="tensorizer")
    assert namespace(config).unshared.startswith("weights_unknown: load_format tensorizer")
    assert namespace(config, "v1").unshared == ""


def test_weights_that_change_while_the_engine_runs_are_shared_with_nobody(config: Any) -> None:
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    assert namespace(config, "v1").unshared.startswith("weights_not_fixed: ")


def test_scales_of_an_encoder_without_a_file_are_shared_with_nobody(config: Any) -> None:
    of_images(config, mm_encoder_attn_dtype="fp8")
    assert namespace(config, "v1").unshared.startswith("kv_scales_not_fixed: ")
