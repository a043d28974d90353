"""The settings of a vLLM engine, and the files of its model besides weights and configuration, that change the values
in its KV cache beyond rounding.

The order of a sum, and with it the last bits of its result, already differs between batches of one engine. So the
choice of a kernel does not count, unless the kernel computes with another precision, or approximates. Settings that
change where memory lies belong to `PoolIdentity`. `tests/vllm/valuesources.py` has a verdict on every setting of vLLM.
The files are those of the quantization, of the processor for images, sound and video, and remote code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstow_service.connectors.engine_core.pathtrail import Trail
from kvstow_service.connectors.engine_core.vllmprocess import COMMIT, find_snapshot, is_in_hub

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "additional_config": (),
    "attention_config": (
        "backend",
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "mla_prefill_backend",
        "use_non_causal",
        "use_prefill_query_quantization",
    ),
    "cache_config": (
        "calculate_kv_scales",
        "kv_cache_dtype_skip_layers",
        "kv_cache_layout",
        "kv_sharing_fast_prefill",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        "swa_bounded_replay",
        "use_kda_recoverssm",
        "use_replayssm",
    ),
    "diffusion_config": ("canvas_length", "max_denoising_steps"),
    "ec_transfer_config": ("ec_connector", "ec_connector_extra_config", "ec_role"),
    "kernel_config": ("linear_backend", "linear_backend_per_quant", "moe_backend", "sparse_indexer_topk_backend"),
    "load_config": ("ignore_patterns", "model_loader_extra_config"),
    "mamba_config": ("enable_stochastic_rounding", "stochastic_rounding_philox_rounds"),
    "model_config": (
        "convert",
        "disable_sliding_window",
        "dtype",
        "model_class_overrides",
        "model_impl",
        "quantization",
        "quantization_config",
    ),
    "multimodal_config": (
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    ),
    "parallel_config": ("all2all_backend", "worker_cls", "worker_extension_cls"),
    "speculative_config": (
        "attention_backend",
        "disable_eagle_block_drop",
        "disable_lookahead_block_hashes",
        "index_share_for_mtp_iteration",
        "kv_cache_dtype",
        "method",
        "moe_backend",
        "parallel_drafting",
        "quantization",
        "use_heterogeneous_vocab",
    ),
}
"""The settings that count, by part of the configuration. A part without names counts as a whole. Settings of the
processor count because vLLM's hash of an image covers the settings of its request, but not those of the engine."""
VARIABLES: Final = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ENABLE_HPC_OPS",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_PLUGINS",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB",
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_TEST_FORCE_LOAD_FORMAT",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_VIDEO_LOADER_BACKEND",
)
"""The environment variables that count, with the text of their values."""
_OF_NO_VALUE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Fields of a model's configuration that do not change KV, or that count as settings of their own."""
_LONG_ROPES = {"longrope", "su", "dynamic"}
"""Kinds of rope scaling that depend on the longest request."""

_WITHOUT_MODEL = {"ngram", "ngram_gpu", "suffix"}
"""Kinds of drafters that guess from tokens alone, and have no KV. vLLM gives them the configuration of the model."""
_OF_TOKENS = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "vocab.json",
}
"""Files that do not count. Most decide which tokens a prompt has, and keys cover the tokens. `generation_config.json`
decides how tokens are sampled, which changes no KV. vLLM's own configuration, which is part of the identity, has the
content of `config.json`."""
_QUANTIZATION = {"hf_quant_config.json", "quant_config.json", "quantize_config.json"}
"""Files of the quantization."""
_DEPTH = 3
"""How many levels of folders below a place are searched for files."""
_MOST_FILES, _MOST_BYTES = 512, 64 << 20
"""Limits on the files of one model, in all places together: how many are read, and how many bytes in total."""


def value_settings(config: Any) -> dict[str, str]:
    """The settings that are set, by name. A setting that is off or automatic is left out, as in versions of vLLM that
    do not have it. Raises `OSError` for a file of scales that cannot be read."""
    settings = {"hf_config": described_digest(config.model_config)}
    for part, names in FIELDS.items():
        if part == "speculative_config" and drafts_from_prompt(config):
            continue
        section = getattr(config.model_config if part == "multimodal_config" else config, part, None)
        values = {name: getattr(section, name, None) for name in names} if names else {"": section}
        for name, value in values.items():
            if value and value != "auto":
                settings[f"{part}.{name}".rstrip(".")] = _text(name, value)
    settings |= {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if are_dummies(config):
        settings["dummy weights"] = f"seed {config.model_config.seed}"
    ropes = _ropes(config.model_config.hf_config.to_dict())
    if _LONG_ROPES & {kind for rope in ropes for kind in (rope.get("rope_type"), rope.get("type"))}:
        settings["model_config.max_model_len"] = str(config.model_config.max_model_len)
    drafter = drafter_of(config)
    if drafter is not None:
        settings["drafter.hf_config"] = described_digest(drafter)
        settings["drafter.dtype"] = str(drafter.dtype)
    return settings


def drafts_from_prompt(config: Any) -> bool:
    return getattr(config.speculative_config, "method", None) in _WITHOUT_MODEL


def drafter_of(config: Any) -> Any:
    """The configuration of the drafter's model; None if it has none."""
    return None if drafts_from_prompt(config) else getattr(config.speculative_config, "draft_model_config", None)


def described_digest(model: Any) -> str:
    """A digest of the model's configuration as vLLM has it, with all overrides."""
    described = model.hf_config.to_dict()
    return digest_of({name: value for name, value in described.items() if name not in _OF_NO_VALUE})


def are_dummies(config: Any) -> bool:
    return str(getattr(getattr(config, "load_config", None), "load_format", "")) == "dummy"


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _text(name: str, value: Any) -> str:
    if name.endswith("_path"):
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]
    if isinstance(value, Mapping | list | tuple | set):
        return digest_of(sorted(map(str, value)) if isinstance(value, set) else value)
    text = str(value)
    return text if len(text) <= 100 else digest_of(text)


def _ropes(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All rope settings in a model's configuration, which may be nested."""
    found = []
    for name, value in described.items():
        if isinstance(value, Mapping):
            found += [value] if name in ("rope_scaling", "rope_parameters") else []
            found += _ropes(value)
    return found


_OTHER_REPOSITORY = re.compile(rb'"[\w.-]+/[\w.-]+--[\w.]+"')
"""A reference to code of another repository in an `auto_map`."""


class ModelFiles(NamedTuple):
    """The files of a model. `digest` covers names and contents, wherever the files are; it is empty if there are none.
    `names_others`: whether they name code of another repository. `changed`: a place on their paths that has changed
    since vLLM started; empty if none has."""

    digest: str
    names_others: bool
    changed: str

    def why_unshared(self, model: Any) -> str:
        """Why it is not certain which files vLLM has read, as a sentence; empty if it is."""
        if self.names_others and not COMMIT.fullmatch(str(model.code_revision)):
            return "files_unknown: the model's code comes from another repository; set code_revision to a commit"
        if self.changed:
            return f"files_changed: {self.changed} has changed since vLLM started, which may have read it before"
        return ""


def model_files(config: Any, started: float) -> ModelFiles | None:
    """The files of a `VllmConfig`; None if they are nowhere on this node, and only those of quantization would count.
    `started`: a moment before vLLM has read any of them, in seconds since the epoch. Raises `OSError`."""
    wanted = _wanted_files(config)
    if not wanted.places:
        return None
    found = read_model_files(wanted.places, processor=wanted.processor, code=wanted.code, loaded_by=started)
    model = config.model_config
    codes = dict(getattr(model.hf_config, "auto_map", None) or {}).values()  # each may name another repository
    others = wanted.code and any("--" in str(code) and str(code).partition("--")[0] != model.model for code in codes)
    return found._replace(names_others=found.names_others or others)


def counted_files(config: Any) -> list[Path]:
    """The files that `model_files` reads. Raises `OSError`."""
    wanted = _wanted_files(config)
    found = []
    for place in wanted.places:
        files = [file for _, file in _files(place, place, _DEPTH)]
        found += [file for file in files if _counts(file, processor=wanted.processor, code=wanted.code)]
    return found


class _WantedFiles(NamedTuple):
    """`places`: the folders with the files. `processor` and `code`: whether files of the processor, and remote code,
    count."""

    places: Sequence[Path]
    processor: bool
    code: bool


def _wanted_files(config: Any) -> _WantedFiles:
    model = config.model_config
    has_processor, has_code = getattr(model, "multimodal_config", None) is not None, bool(model.trust_remote_code)
    names = [(model.model, model.revision), (model.hf_config_path, None)]
    names += [(model.tokenizer, model.tokenizer_revision)] if has_processor else []
    places = []
    for name, revision in dict.fromkeys(names):
        if not name or Path(name).is_file():
            continue
        place = Path(name) if Path(name).is_dir() else find_snapshot(name, revision)
        if place is not None:
            places.append(place)
        elif has_processor or has_code:
            raise OSError(f"{name} is neither a folder nor in the cache of the Hugging Face Hub")
    return _WantedFiles(places, has_processor, has_code)


def read_model_files(places: Sequence[Path], *, processor: bool, code: bool, loaded_by: float) -> ModelFiles:
    """Read the files in the folders `places`. `processor` and `code`: whether files of the processor, and remote code,
    count. `loaded_by`: a change of a file after this moment, in seconds since the epoch, is reported, unless the cache
    of the Hub names the file by its content. Raises `OSError`, also if there are too many files, or too large ones."""
    digest, others, size = hashlib.sha256(), False, 0
    found: list[Path] = []
    for place in places:
        for name, file in _files(place, place, _DEPTH):
            if not _counts(file, processor=processor, code=code):
                continue
            found.append(file)
            size += file.stat().st_size
            if size > _MOST_BYTES or len(found) > _MOST_FILES:
                raise OSError(
                    f"more than {_MOST_FILES} files, or {_MOST_BYTES >> 20} MiB of them, may change KV in "
                    f"{', '.join(map(str, places))}"
                )
            content = file.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + hashlib.sha256(content).digest())
            others |= code and _OTHER_REPOSITORY.search(content) is not None
    trail = Trail.of(found)
    newer = (*trail.newer_than(loaded_by), *trail.moved_after(loaded_by))
    changed = next((place for place in newer if not is_in_hub(place)), "")
    return ModelFiles(digest.hexdigest()[:16] if found else "", others, changed)


def _counts(file: Path, *, processor: bool, code: bool) -> bool:
    if file.name in _QUANTIZATION:
        return True
    if file.suffix == ".py":
        return code
    is_setting = file.suffix == ".json" and not file.name.endswith(".index.json") and file.name not in _OF_TOKENS
    return processor and is_setting


def _files(folder: Path, root: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The files below `folder` with their names below `root`, in an order that does not depend on the place."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if depth:
                yield from _files(entry, root, depth - 1)
        else:
            yield entry.relative_to(root).as_posix(), entry
