"""The vLLM process that the connector runs in: its configuration, its node, its log, when it began, and the local
cache of the Hugging Face Hub that it reads.

The time when it began matters because a file that has changed since may differ from what vLLM has read."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.kvgroups import layer_spec

_LORA_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)


@dataclass(frozen=True, slots=True)
class VLLMProcess:
    """One vLLM engine, as seen from one of its processes. Sizes are in tokens.

    `engine_id` is the same in all processes of the engine, and in no other engine. `rank` counts the workers of the
    engine over all its nodes; 0 in the scheduler's process. `max_requests` is the limit of one step. `frees_late`: vLLM
    hands out a freed block only after every step in flight has ended, so a load never writes a block that an older step
    still writes. `recomputes`: whether vLLM computes a request whose load has failed. `replicated`: whether all ranks
    have the same KV (MLA). `drafts`: whether it has a drafter. With EAGLE or MTP, vLLM computes the last block of a
    prefix that it finds on the GPU again. `lora_settings`: the settings that decide how an adapter is applied; None if
    requests have no adapters. `may_load_by_layer`: whether a step may compute with what it loads itself.
    `is_alone`: whether vLLM has no other connector; True in the scheduler's process, which does not know it.
    `takes_steps_back`: whether vLLM discards what a step has computed for a request with blocks that are reported as
    invalid, and computes it again.
    """

    engine_id: str
    model: str
    rank: int
    num_ranks: int
    ranks_per_node: int
    data_parallel_index: int
    context_parallel: int
    max_batched_tokens: int
    max_requests: int
    frees_late: bool
    recomputes: bool
    replicated: bool = False
    drafts: bool = False
    lora_settings: str | None = None
    may_load_by_layer: bool = False
    takes_steps_back: bool = False
    is_alone: bool = True

    @classmethod
    def of(cls, config: Any, kv_cache_config: Any, engine_transfer: Any) -> VLLMProcess:
        """Read a `VllmConfig` and a `KVCacheConfig`. `engine_transfer` is the `KVTransferConfig` that vLLM's scheduler
        uses; a child of MultiConnector has its own in `config`. Raises `ConfigError` for settings that KVStow does not
        support."""
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError("enable_prefix_caching", False, "true: blocks are found by their prefix hash")
        if transfer.kv_role != "kv_both":
            allowed = (
                "kv_both: a cache is written and read. Inside MultiConnector each connector has a kv_role of its own"
            )
            raise ConfigError("kv_role", transfer.kv_role, allowed)
        if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            raise ConfigError("prefill_context_parallel_size", parallel.prefill_context_parallel_size, "1")
        if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
            allowed = "mp or ray: one scheduler decides for all ranks"
            raise ConfigError("distributed_executor_backend", parallel.distributed_executor_backend, allowed)
        # A drafter writes blocks after its step's output is known, and so does a step that only zeroes blocks.
        drafts = config.speculative_config is not None
        writes_late = drafts or kv_cache_config.needs_kv_cache_zeroing
        # The same as vLLM's `max_concurrent_batches > 1`, which takes 0.08 s to read the entry points of all packages.
        overlaps = config.scheduler_config.async_scheduling or parallel.pipeline_parallel_size > 1
        return cls(
            engine_id=f"{config.instance_id}-{transfer.engine_id}",  # users may set the second part
            model=str(config.model_config.served_model_name or ""),
            rank=parallel.rank % parallel.world_size,
            num_ranks=parallel.world_size,
            ranks_per_node=1 if parallel.use_ray else parallel.local_world_size,
            data_parallel_index=parallel.data_parallel_index,
            context_parallel=parallel.decode_context_parallel_size,
            max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_requests=config.scheduler_config.max_num_seqs,
            frees_late=overlaps and engine_transfer.is_kv_consumer and not writes_late,
            recomputes=engine_transfer.kv_load_failure_policy == "recompute",
            replicated=_is_replicated(parallel, kv_cache_config),
            drafts=drafts,
            lora_settings=None
            if (lora := config.lora_config) is None
            else json.dumps({name: str(getattr(lora, name, None)) for name in _LORA_SETTINGS}),
            may_load_by_layer=not drafts and _has_simple_steps(config),
            takes_steps_back=not overlaps and _rewinds_requests(config, kv_cache_config),
            is_alone=transfer.kv_connector == engine_transfer.kv_connector,
        )


def _has_simple_steps(config: Any) -> bool:
    """Whether the engine's steps are of the kind with which loads within a step were tried: one pipeline stage and no
    micro-batches. A rank that sleeps loses its memory, and a step that was planned before could not load from it."""
    parallel = config.parallel_config
    return (
        parallel.pipeline_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and not getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", False))
        and not getattr(config.model_config, "enable_sleep_mode", False)
    )


def _rewinds_requests(config: Any, kv_cache_config: Any) -> bool:
    """Whether a request with invalid blocks can be computed again. vLLM finds the requests of an invalid block only if
    there is one KV group. Model runner V2 ignores that a running request has fewer computed tokens than before (vLLM
    0.33), so its answers would be wrong. With asynchronous scheduling, the next step of the request is under way, and
    its output would be used."""
    is_v2 = getattr(config, "use_v2_model_runner", True)  # vLLM 0.30 has it
    return not is_v2 and len(kv_cache_config.kv_cache_groups) == 1


def _is_replicated(parallel: Any, kv_cache_config: Any) -> bool:
    if not parallel.tensor_parallel_size == parallel.world_size > 1 or parallel.decode_context_parallel_size > 1:
        return False
    specs = [layer_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    return all("MLA" in type(spec).__name__ for spec in specs)


def this_node() -> str:
    """The name of the machine or container that this process runs in. Processes of the same node share a file
    system."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def hash_block_tokens(config: Any, kv_cache_config: Any) -> int:
    """How many tokens one of a request's block hashes covers."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    if known is not None:
        return int(known)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, config)[1])


def join_vllm_log() -> None:
    """Write KVStow's log lines to vLLM's log, unless the logger "kvstow" is already configured. vLLM configures only
    its own logger, so lines of other loggers below warning level would be lost. Idempotent."""
    ours, theirs = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = False


def process_start() -> float:
    """When this process began, in seconds since the epoch. vLLM loads weights and adapters after that."""
    return _start_of("self")


def program_start() -> float:
    """When the process that has started this one began, if that is vLLM's, too, because it reads the model's
    configuration and the files of its processor before it starts engines."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return process_start()
    try:
        return min(process_start(), _start_of(str(parent.pid)))
    except OSError:  # it has ended, or has another namespace
        return process_start()


def _start_of(process: str) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the time in ticks since the machine started
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


COMMIT = re.compile("[0-9a-f]{40}")
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""The names of blobs: Git's SHA-1 of a file, or the SHA-256 of a large file."""
_SNAPSHOT = re.compile(r"/models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/(?P<path>.*)$")


def find_snapshot(repository: str, revision: str | None, cache: str | None = None) -> Path | None:
    """The folder of a repository's files at a revision, by default the latest that the cache knows; None if it is not
    in the cache. `cache`: the folder of the cache, if it is not the usual one."""
    reference, folder = reference_of(repository, revision, cache), _folder(repository, cache)
    commit = (revision or "") if reference is None else reference.read_text().strip()
    if folder is None or not COMMIT.fullmatch(commit) or not (folder / "snapshots" / commit).is_dir():
        return None
    return folder / "snapshots" / commit


def reference_of(repository: str, revision: str | None, cache: str | None = None) -> Path | None:
    """The file that says which commit a branch or a tag is; None if there is none, as for a commit."""
    folder = _folder(repository, cache)
    reference = None if folder is None else folder / "refs" / (revision or "main")
    return reference if reference is not None and reference.is_file() else None


class InSnapshot(NamedTuple):
    """A place in the cache of the Hub. `path`: relative to the `snapshot` of a commit."""

    repository: str
    commit: str
    snapshot: Path
    path: str


def in_snapshot(place: Path) -> InSnapshot | None:
    """Where in the cache of the Hub this place is; None for any other place."""
    found = _SNAPSHOT.search(f"{place.absolute()}/")
    if found is None:
        return None
    path = found["path"].strip("/")
    snapshot = Path(str(place.absolute())[: len(str(place.absolute())) - len(path)])
    return InSnapshot(found["repository"].replace("--", "/"), found["commit"], snapshot, path)


def blob_of(file: Path) -> str | None:
    """The name of the blob that is a file of a snapshot: a digest of its content. None for a real file, and for a link
    that leads elsewhere."""
    place = in_snapshot(file)
    if place is None or not file.is_symlink():
        return None
    blob = Path(os.path.normpath(file.parent / os.readlink(file)))
    is_one = blob.parent == place.snapshot.parents[1] / "blobs" and _BLOB.fullmatch(blob.name)
    return blob.name if is_one and not blob.is_symlink() else None


def is_in_hub(place: str) -> bool:
    """Whether this is a folder, a blob or a link to a blob that the library of the Hub has made. It never replaces one
    by something else of the same name."""
    path = Path(place)
    if blob_of(path) is not None:
        return True
    parts = path.parts
    repository = next((number for number, part in enumerate(parts) if part.startswith("models--")), None)
    if repository is None:
        return False
    if path.parent.name == "blobs" and len(parts) == repository + 3:
        return _BLOB.fullmatch(path.name) is not None and not path.is_symlink()
    return path.is_dir() and not path.is_symlink()


def adapter_folders() -> list[Path]:
    """The folders where vLLM finds adapters that are not named by a path."""
    from huggingface_hub import constants  # type: ignore[import-not-found, unused-ignore]

    resolver = os.environ.get("VLLM_LORA_RESOLVER_CACHE_DIR")
    return [Path(constants.HF_HUB_CACHE), *([Path(resolver)] if resolver else [])]


def _folder(repository: str, cache: str | None) -> Path | None:
    from huggingface_hub import constants  # type: ignore[import-not-found, unused-ignore]

    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):  # names then mean other repositories
        return None
    return Path(cache or constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
