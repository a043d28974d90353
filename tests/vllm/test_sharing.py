"""What vLLM computes from besides tokens and weights: a difference makes another identity, here and in the fleet, and
what is uncertain is shared with nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.harness.setup import Setup, make_vllm_config

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.tier.fingerprint import fingerprint
from kvstow_service.connectors.engine_core import vllmprocess
from kvstow_service.connectors.vllm import engineidentity, modelweights, valuesettings

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


def start_at(patch: pytest.MonkeyPatch, moment: float) -> None:
    patch.setattr(vllmprocess, "_start_of", lambda process: moment)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    made = make_vllm_config(Setup("identity"), "kvstow_service.connectors.vllm", {})
    made.model_config = SimpleNamespace(**vars(made.model_config))  # it is shared by all tests
    made.load_config = SimpleNamespace(load_format="auto")
    made.model_config.model = made.model_config.tokenizer = write_model(tmp_path / "model")
    made.model_config.hf_config_path = made.model_config.multimodal_config = None
    made.model_config.trust_remote_code = False
    return made


def write_model(folder: Path) -> str:
    files = {
        "model.safetensors": "weights",
        "preprocessor_config.json": "{}",
        "modeling_model.py": "pass",
        "tokenizer.json": "{}",
        "quantize_config.json": "{}",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return str(folder)


def namespace(config: Any, weights_id: str | None = None) -> NamespaceIdentity:
    return engineidentity.namespace_identity(config, 16, weights_id)


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


def test_files_that_cannot_be_read_are_shared_with_nobody(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_images(config)
    config.model_config.tokenizer = "org/absent"
    assert "org/absent is neither a folder" in namespace(config, "v1").unshared
    config.model_config.tokenizer = config.model_config.model
    monkeypatch.setattr(valuesettings, "_MOST_BYTES", 1)
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


def test_weights_that_are_newer_than_the_process_are_shared_with_nobody(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config.model_config.model) / "quantize_config.json").unlink()  # it counts with any name of the weights
    written = (Path(config.model_config.model) / "model.safetensors").stat().st_ctime
    start_at(monkeypatch, written - 1)
    assert namespace(config).unshared.startswith("files_changed: files of the weights")
    assert namespace(config, "v1").unshared == ""
    start_at(monkeypatch, written + 1)
    assert namespace(config).unshared == ""


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
    return make_cache(tmp_path / "hub", config, monkeypatch)


def make_cache(cache: Path, config: Any, patch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub, with a snapshot of org/name, which is the model."""
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    move(cache, "1" * 40)
    config.model_config.model = config.model_config.tokenizer = "org/name"
    config.model_config.revision = None
    return cache


def move(cache: Path, commit: str) -> None:
    repository = cache / "models--org--name"
    write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_a_snapshot_is_its_commit(config: Any, cache: Path) -> None:
    here = namespace(config)
    assert (here.model, here.weights_id, here.weights_source, here.unshared) == ("org/name", "1" * 40, "snapshot", "")
    move(cache, "2" * 40)
    assert namespace(config).weights_id == "2" * 40
    config.model_config.revision = "1" * 40
    assert namespace(config) == here


def test_a_revision_that_has_moved_is_shared_with_nobody(
    config: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = config.model_config.hf_config.to_dict()
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: described, _commit_hash="1" * 40)
    assert namespace(config).unshared == ""
    move(cache, "2" * 40)
    assert namespace(config).unshared.startswith("revision_moved: revision main of org/name")
    config.model_config.hf_config._commit_hash = None
    assert namespace(config).unshared == "", "the reference is older than vLLM"
    start_at(monkeypatch, 1.0)
    assert namespace(config).unshared.startswith("revision_moved: ")
    config.model_config.revision = "2" * 40
    assert namespace(config).unshared == "", "a commit does not move"


def test_weights_come_from_the_folder_that_vllm_downloads_to(config: Any, cache: Path, tmp_path: Path) -> None:
    config.load_config = SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "other"))
    assert namespace(config).unshared.startswith("weights_unknown: ")
    move(tmp_path / "other", "3" * 40)
    assert namespace(config).weights_id == "3" * 40


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


# -- mutants ----------------------------------------------------------------------------------------------------------

Mutate = Callable[[pytest.MonkeyPatch], None]


def settings_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(valuesettings, "FIELDS", {})


def files_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engineidentity, "model_files", lambda config, started: None)


def newer_files_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(valuesettings.ModelFiles, "why_unshared", lambda files, model: "")


def newer_weights_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modelweights.Weights, "changed_after", lambda weights, moment: False)


def revisions_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engineidentity, "_has_moved", lambda load, model, weights: False)


def the_usual_cache_is_believed(patch: pytest.MonkeyPatch) -> None:
    folder = vllmprocess._folder
    patch.setattr(vllmprocess, "_folder", lambda repository, cache: folder(repository, None))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (files_do_not_count, test_the_processors_files_count_where_there_is_one),
        (files_do_not_count, test_remote_code_counts_where_it_is_trusted),
        (newer_files_are_believed, test_files_that_are_newer_than_vllm_are_shared_with_nobody),
        (newer_weights_are_believed, test_weights_that_are_newer_than_the_process_are_shared_with_nobody),
        (revisions_are_believed, test_a_revision_that_has_moved_is_shared_with_nobody),
        (the_usual_cache_is_believed, test_weights_come_from_the_folder_that_vllm_downloads_to),
    ],
    ids=lambda value: value.__name__,
)
def test_an_identity_without_one_of_its_protections_is_found_out(
    mutant: Mutate, test: Callable[..., None], config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = {"config": config, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    if "cache" in wanted:
        have["cache"] = make_cache(tmp_path / "hub", config, monkeypatch)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(**{name: have[name] for name in wanted})


def test_an_identity_without_its_settings_is_found_out(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_do_not_count(monkeypatch)
    of_images(config)
    change = lambda: of_images(config, mm_processor_kwargs={"size": 1})  # noqa: E731
    with pytest.raises(AssertionError):
        assert_differs(config, change)
